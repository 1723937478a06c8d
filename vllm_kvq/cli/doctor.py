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
        "Versions, hardware, kernels and compilers, cache memory, known vLLM faults, broken patches.",
        ("", "--patches", "--json"),
        "a problem prevents serving",
    )
    p.add_argument("--patches", action="store_true", help="also list the changes made to vLLM")
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
        problems = f"{len(bad)} problem{'s' * (len(bad) > 1)}, marked {BAD}"
        print((f"serving does not work here: {problems}" if bad else "serving works here") + "\n")
        console.Table(("topic", "", "finding"), [(f.topic, f.status, f.text) for f in found], 3).show()
    return console.FOUND if bad else console.DONE
