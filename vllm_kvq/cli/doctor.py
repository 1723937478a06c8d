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
        "Versions, hardware, kernels and compilers, memory for the cache, known faults of this vLLM, faulty patches.",
        ("", "--patches", "--json"),
        "something keeps serving from working",
    )
    p.add_argument("--patches", action="store_true", help="list what is changed in vLLM, too")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    be_quiet()
    from vllm_kvq.integration.preview.environment import BAD, findings

    found = findings(args.patches)
    bad = [f for f in found if f.status == BAD]
    if args.json:
        console.show_json({"works": not bad, "findings": [asdict(f) for f in found]})
    else:
        print(("serving works here" if not bad else f"what keeps serving from working: {len(bad)} marked {BAD}") + "\n")
        console.Table(("topic", "", "finding"), [(f.topic, f.status, f.text) for f in found], 3).show()
    return console.FOUND if bad else console.DONE
