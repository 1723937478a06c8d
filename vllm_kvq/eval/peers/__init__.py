"""Methods that other projects serve, as formats, so the evaluation measures them under the same conditions as ours.

They follow their authors' code in what is stored and how it is rounded, but use this project's pages. Like all formats,
they read in full precision the tokens that do not yet fill a pack unit. They don't get this project's default sinks: a
peer has the sinks that it ships with, or none. Lists for users don't name them. They are served by PyTorch kernels,
except KIVI with sinks, which is served like KIVI.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_kvq.eval.peers import e4m3, int4_token, kivi_sinks, kvarn, nvfp4, oscar, q4_0, turbo

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
