"""`vllm-kvq doctor`: what is installed, and what keeps a server from starting or makes it slow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from vllm_kvq import console
from vllm_kvq.cli.logs import be_quiet


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq doctor",
        "Versions, hardware, kernels and compilers, memory for the cache, known faults of this vLLM, active patches.",
        ("", "--json"),
        "something keeps serving from working",
    )
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    be_quiet()
    from vllm_kvq.integration.preview.environment import BAD, findings

    found = findings()
    bad = [f for f in found if f.status == BAD]
    if args.json:
        console.show_json({"works": not bad, "findings": [asdict(f) for f in found]})
    else:
        console.Table(("topic", "", "finding"), [(f.topic, f.status, f.text) for f in found], 3).show()
        print("\n" + ("serving works here" if not bad else f"what keeps serving from working: {len(bad)} marked {BAD}"))
    return console.FOUND if bad else console.DONE
