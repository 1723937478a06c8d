"""docs/compatibility.md, from the list of patches: python -m proof patches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from vllm_kvq.integration.patches.names import SUPPORTED
from vllm_kvq.integration.patches.patch import Kind, Moment, Patch
from vllm_kvq.integration.patches.registry import PATCHES

HEAD = f"""\
# Compatibility

`python -m proof patches` prints this page from the list of patches (`vllm_kvq/integration/patches/registry.py`), and
`vllm-kvq doctor --patches` prints the rows that concern the installed vLLM.

vllm-kvq supports vLLM {" and ".join(SUPPORTED)} and no other version: with any other its formats are not offered,
and the log says why. If a supported vLLM lacks a private name of this list, the server says which name, for which
patch, and what to install. Names that every server needs are looked for when vLLM loads its plugins. Those that only
some servers need are looked for before these load their weights, so that other servers start. The column "until" says
what would let a patch go; [upstream.md](upstream.md) shows how to reproduce the two faults of vLLM that have nothing to
do with compression.
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


def page() -> str:
    lines = [HEAD]
    for kind, title in KINDS.items():
        lines += [f"## {title}", ""]
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
