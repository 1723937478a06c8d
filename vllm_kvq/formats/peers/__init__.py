"""Methods that others serve, as formats, so that the evaluation measures them in the same place as ours.

They follow their authors' code in what is stored and how it is rounded, and lie in this project's pages. They get what
every format has: tokens that do not fill a pack unit yet are read in full precision. They don't get this project's
default sinks: a peer has those that it ships with, or none. Lists for users don't name them. PyTorch kernels serve
them; KIVI with sinks alone is served as KIVI is.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_kvq.formats.peers import e4m3, int4_token, kivi_sinks, kvarn, nvfp4, oscar, q4_0, turbo

_DECLARED = (
    *e4m3.FORMATS,
    *int4_token.FORMATS,
    *turbo.FORMATS,
    *kvarn.FORMATS,
    *oscar.FORMATS,
    *q4_0.FORMATS,
    *nvfp4.FORMATS,
    *kivi_sinks.FORMATS,
)
FORMATS = tuple(replace(fmt, defaults={"S": 0, **fmt.defaults}) for fmt in _DECLARED)
PEERS = tuple(fmt.name for fmt in FORMATS)
