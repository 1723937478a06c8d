"""`vllm-kvq doctor`: what is installed, and what keeps a server from starting or makes it slow."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

from vllm_kvq import console
from vllm_kvq.cli.logs import be_quiet

PROG = "vllm-kvq doctor"
IMPORTS = "importing vLLM and all that the patches change takes ten seconds"
"""Said at once, because the verdict comes first and needs what is imported. A server imports the same."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Versions, hardware, kernels and compilers, cache memory, known vLLM faults, broken patches.\n"
        f"With vLLM installed, {IMPORTS}.",
        ("", "--patches", "--json"),
        "a problem prevents serving",
    )
    p.add_argument("--patches", action="store_true", help="also list the changes made to vLLM")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    be_quiet()
    if not args.json and find_spec("vllm"):
        print(f"{PROG}: {IMPORTS}", file=sys.stderr, flush=True)
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
