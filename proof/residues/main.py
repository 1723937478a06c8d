"""The command `python -m proof residues`.

    python -m proof residues                              every length, `lossless` and a format of each method
    python -m proof residues --formats lossless --stride 7
    python -m proof residues --report FILE                the table goes to FILE, a page of docs/results

Exits with 1 on a mismatch, after printing a case for `python -m proof fuzz --replay FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.fuzz.case import LLAMA, MODEL, Case
from proof.fuzz.main import COLUMNS, default, row, table
from proof.residues import sweep
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import FORMATS
from vllm_kvq.kernels.cpu.processor import processor_name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof residues",
        description="Every prompt length modulo the page on real engines, every token judged.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", type=words(sorted(FORMATS)), default=default(), metavar="NAME,...")
    parser.add_argument("--block-size", type=int, default=64, metavar="N", help="tokens of a page (%(default)s)")
    parser.add_argument("--stride", type=int, default=1, help="from one length to the next (%(default)s)")
    parser.add_argument("--runner", choices=("V1", "V2"), default="V1", help="vLLM's model runner (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="engines at a time (cores)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file for processor, command and table")
    options = parser.parse_args(argv)
    if options.jobs < 1 or options.stride < 1:
        parser.error("--jobs and --stride must be positive")
    try:
        cases = [
            sweep.case(setup, options.stride)
            for name in options.formats
            for setup in sweep.setups(name, options.block_size, options.runner)
        ]
    except ValueError as error:
        parser.error(f"--block-size {options.block_size}: {error}")
    os.environ["OMP_NUM_THREADS"] = "1"
    # engines that are done are killed, and multiprocessing warns of the semaphores that they leave behind
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    return sweep_all(cases, options)


def sweep_all(cases: Sequence[Case], options: argparse.Namespace) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from proof.fuzz.attempt import Runner
    from proof.fuzz.session import Count
    from vllm_kvq.bench.random_model import random_model
    from vllm_kvq.kernels.cpu.library import library

    library()  # compiles if the sources have changed: the engines' time limits do not allow for that
    torch.set_num_threads(1)
    disable_progress_bar()
    counts = {name: Count() for name in options.formats}
    findings: list[tuple[Case, list[str]]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvq-residues-") as folder:
        model = str(random_model(Path(folder) / "model", **MODEL))

        def judge(case: Case) -> None:
            runner = Runner(model, case.setup)
            try:
                verdict = runner.judge(case.traces)
            finally:
                runner.close()
            if verdict.mismatches:
                findings.append((case, verdict.mismatches))
            count = counts[case.setup.format]
            count.traces += len(case.traces)
            count.verdict.add(verdict)
            count.models[LLAMA] = count.models.get(LLAMA, 0) + 1

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(judge, cases))
    rows = {name: row(count) for name, count in counts.items()}
    rows["total"] = {c: sum(r[c] for r in rows.values()) for c in COLUMNS}
    minutes = (time.monotonic() - begun) / 60
    print(table(rows), f"{minutes:.0f} minutes", sep="\n", flush=True)
    if options.report:
        options.report.write_text(page(options, minutes, table(rows)), encoding="utf-8")
    for case, messages in findings[:1]:
        print(f"\nMISMATCH: {'; '.join(messages[:3])}")
        print("save the next line in a file and run it again with: python -m proof fuzz --replay FILE")
        print(json.dumps(case.to_json()))
    return int(bool(findings))


def page(options: argparse.Namespace, minutes: float, found: str) -> str:
    command = f"python -m proof residues --formats {','.join(options.formats)}"
    command += "".join(
        f" --{name.replace('_', '-')} {getattr(options, name)}"
        for name, usual in (("block_size", 64), ("stride", 1), ("runner", "V1"))
        if getattr(options, name) != usual
    )
    some = f" (of which every {options.stride} were tried)" if options.stride > 1 else ""
    return f"""# Every prompt length

Every prompt length from 1 to two pages of {options.block_size}, the window and {sweep.MORE} tokens{some}:
cold, and with a prefix hit behind each page; prompts whole, and cut into chunks at any place; with 0, 1 and 5 drafted
tokens; answers pass the next page's border. Every token is judged: `lossless` must give plain vLLM's tokens, the others
the reference's (docs/testing.md).

{minutes:.0f} minutes on {processor_name()}, {options.jobs} {"engine" if options.jobs == 1 else "engines"} at a time.

    {command}

{chr(10).join("    " + line for line in found.splitlines())}

A *tie* is a token that the reference chooses as well once it is disturbed by what float32 rounds.
"""
