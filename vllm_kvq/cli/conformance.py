"""`vllm-kvq conformance`: whether a format does what every format must."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from vllm_kvq import console
from vllm_kvq.cli.arguments import ALL, add_formats, add_head_sizes
from vllm_kvq.eval.choice import FP8, Choice
from vllm_kvq.eval.conformance.checks import CHECKS
from vllm_kvq.eval.conformance.report import Report, conform
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import get_format

USUAL_HEADS = "64,80,128"
NEIGHBOURS = (BUDGETS[RECOMMENDED].formats[-1], "kivi4", FP8)
"""What a format is compared with on a real model: the recommended one that needs no fitting to it, KIVI's 4 bits and
vLLM's own 8."""
NOTES = """
bits: per cached number in packed pages. q . K, V: relative errors of synthetic keys with wide channels and of values,
every token packed. The next step is the format's loss on a real model, next to others:
vllm-kvq eval MODEL --formats {names} --out FOLDER"""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq conformance",
        "Check in seconds, without a model and without vLLM, that formats do what every format must:\n"
        + "\n".join(f"  {check.name:<12} {check.about}" for check in CHECKS),
        ("--formats kitty2", "--formats kitty2:boost=half,kivi4 --head-size 128"),
        "a check failed, or a format refuses every head size",
    )
    add_formats(p, ALL, "is not ours to check")
    add_head_sizes(p, USUAL_HEADS)
    console.add_json(p)
    return p


def table(found: dict[str, list[Report]]) -> console.Table:
    rows = []
    for name, reports in found.items():
        for r in reports:
            if r.refused is not None:
                rows.append([name, str(r.head_size), "-", "-", "-", "refused"])
            else:
                verdict = "passed" if r.passed else "failed: " + ", ".join(r.faults)
                errors = ["-" if x is None else f"{x:.3f}" for x in (r.key_error, r.value_error)]
                rows.append([name, str(r.head_size), f"{r.bits:.2f}", *errors, verdict])
    return console.Table(["format", "d", "bits", "q . K", "V", f"{len(CHECKS)} checks"], rows)


def sentences(found: dict[str, list[Report]]) -> list[str]:
    """What is wrong, once for all head sizes at which it is."""
    where: dict[tuple[str, str], list[int]] = {}
    for name, reports in found.items():
        for r in reports:
            said = {"refused": r.refused} if r.refused is not None else r.faults
            for check, sentence in said.items():
                where.setdefault((f"{name}, {check}", sentence), []).append(r.head_size)
    return [f"{what}: {said} (d={', '.join(map(str, sizes))})" for (what, said), sizes in where.items()]


def conforms(reports: Sequence[Report]) -> bool:
    """Whether every check passed at every head size that is not refused, and there is such a size."""
    return any(r.passed for r in reports) and not any(r.faults for r in reports)


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    chosen: list[Choice] = args.formats
    found = {c.label: [conform(get_format(c.format), d, c.options) for d in args.head_size] for c in chosen}
    if args.json:
        console.show_json([{"format": name, **asdict(r)} for name, reports in found.items() for r in reports])
    else:
        table(found).show()
        print(*sentences(found), sep="\n")
        print(NOTES.format(names=",".join(dict.fromkeys((*found, *NEIGHBOURS)))))
    return console.DONE if all(map(conforms, found.values())) else console.FOUND
