"""The instruments: python -m proof COMMAND, from a checkout. Each command lives in the module that does its work.

Exit status: 0 done, 1 found something wrong, 2 wrong usage. A command that runs another one returns its status.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "fuzz": ("proof.fuzz.main", "random traces on real engines, every token judged"),
    "residues": ("proof.residues.main", "every prompt length modulo the page, by every way to cut it, judged"),
    "contexts": ("proof.contexts.main", "contexts of 8k to 32k tokens on real engines, judged"),
    "long": ("proof.long.main", "long prompts of real text on a real model: `lossless` against plain vLLM"),
    "options": ("proof.options.main", "random combinations of options on every path, judged by the reference"),
    "soak": ("proof.soak.main", "a real server under mixed load for a while, then its errors, memory and blocks"),
    "clients": ("proof.clients.main", "what clients do with a server, on a real pretrained model: each has to work"),
    "demo": ("proof.demo.serve", "a real server with a low-bit cache, and an answer from it"),
    "train": ("proof.demo.model", "trains the demo model, or continues its training"),
    "weights": ("proof.weights.main", "real pretrained models as checkpoints, from packages that ship their weights"),
    "biases": (
        "proof.demo.biases",
        "writes key biases and wide channels into a Llama without changing what it computes",
    ),
    "mutants": ("proof.mutants.main", "plants faults one at a time: is each one noticed by the tests?"),
    "ptx": ("proof.ptx.main", "a Python command whose GPU kernels run from their PTX, on a CPU"),
    "probe": ("proof.kernels.probe", "a Python command on a processor that pretends to have AVX-512 VNNI"),
    "sanitize": ("proof.kernels.sanitize", "a command with the CPU kernels under g++'s sanitizers"),
    "emulate": ("proof.kernels.emulate", "a command with the CPU kernels for AVX-512 and AMX, on a processor without"),
    "instructions": ("proof.tables.instructions", "instructions of CPU attention per cached element, counted"),
    "compile": ("proof.tables.gpu.compile_table", "registers, spills and instructions of the GPU kernels"),
    "traffic": ("proof.tables.gpu.traffic", "counts what the GPU kernels load per cached token in a decode step"),
    "roofline": (
        "proof.tables.gpu.roofline",
        "computes bytes and instructions of GPU attention, and the bounds that follow",
    ),
    "scheduler": (
        "proof.tables.scheduler",
        "the cost of KV cache groups in vLLM's scheduler, and the savings of smaller pages",
    ),
    "transforms": ("proof.tables.transformed.transforms", "what was tried for transform coding, on a real model"),
    "spectrum": (
        "proof.tables.transformed.spectrum",
        "what bits by channel are worth to transformed keys, on a real model",
    ),
    "admit": ("proof.admit.main", "installs a vLLM release, checks the names patches need, runs tests"),
    "models": ("proof.models.document", "prints docs/models.md"),
    "patches": ("proof.tables.patches", "prints docs/compatibility.md"),
    "connectors": ("proof.tables.connectors", "prints docs/results/connectors.md"),
    "site": ("proof.site.main", "builds the documents' site, and looks at its pages in a browser"),
    "pictures": ("proof.pictures.main", "draws docs/pictures from recorded results and from the formats"),
}
"""Command -> its module, whose `main(arguments)` gives the exit status, and what it does."""


def usage() -> str:
    lines = [f"  {name:14}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m proof COMMAND ...", "", *lines, "", "Each command has its own --help."])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return int(importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]))
    if arguments[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if arguments:
        print(f"python -m proof: there is no command {arguments[0]!r}\n", file=sys.stderr)
    print(usage(), file=sys.stderr)
    return 2


# guarded: multiprocessing imports the main module again in its children
if __name__ == "__main__":
    raise SystemExit(main())
