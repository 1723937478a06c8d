"""`vllm-kvq bench gpu`: decode steps and prompts on a GPU, without vLLM."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import torch

from vllm_kvq import console
from vllm_kvq.bench.gpu import chunks, decode, prompts, table
from vllm_kvq.bench.gpu.decode import Shape
from vllm_kvq.bench.gpu.kept import Kept
from vllm_kvq.bench.gpu.results import NoTime, Results, say
from vllm_kvq.cli.arguments import ALL, add_context, add_formats, add_out, formats
from vllm_kvq.cli.bench import gpu_report
from vllm_kvq.cli.bench.arguments import OWN, add_batch
from vllm_kvq.cli.page.plots import IF_INSTALLED
from vllm_kvq.eval.choice import Choice

PROG = "vllm-kvq bench gpu"
OWN_SHAPES = {"dry-run": ("context", "batch", "compile"), "compile": ("context", "batch")}
"""Flags, and the arguments that they would ignore."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        PROG,
        "Decode times of the Triton and CUDA kernels on a GPU, against attention over bf16 and fp8 and against the\n"
        "copy bandwidth: 32 query heads on 8 KV heads of 128 channels. Needs PyTorch and Triton, but not vLLM.\n"
        "Takes minutes: about as long as --seconds allows.",
        ("--out docs/results", "--formats klt3,kitty2 --context 65536 --batch 1,8", "--dry-run"),
        "there is no GPU here",
    )
    add_formats(p, ALL, OWN)
    add_context(p, None, f"per request (default: {','.join(map(str, decode.CONTEXTS))})", several=True)
    batches = ",".join(map(str, decode.BATCHES))
    add_batch(p, None, f" (default: {batches})", several=True)
    text = "time after which no measurement is started"
    p.add_argument("--seconds", type=float, default=300, metavar="SECONDS", help=text)
    kept = "gpu-DEVICE.csv (whose measurements are reused), gpu-DEVICE.md"
    add_out(p, f"report.html, {kept}, and gpu-DEVICE.png {IF_INSTALLED}")
    p.add_argument("--dry-run", action="store_true", help="use tiny shapes, without a GPU: the times mean nothing")
    p.add_argument("--compile", action="store_true", help="only launch everything once, to compile it")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    for flag, others in OWN_SHAPES.items():
        given = [name for name in others if getattr(args, name)]
        if getattr(args, flag.replace("-", "_")) and given:
            p.error(f"--{flag} launches shapes of its own; leave out {', '.join(f'--{name}' for name in given)}")
    if not args.seconds >= 0:
        p.error(f"--seconds {args.seconds:g} is below 0; 0 starts no measurement")
    try:
        names = with_kernels(args.formats)
    except ValueError as error:
        p.error(str(error))
    contexts, batches = args.context or decode.CONTEXTS, args.batch or decode.BATCHES
    deadline = time.monotonic() + args.seconds
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        device, name, tokens = torch.device("cpu"), "dry run: times mean nothing", 64
        shapes = [Shape(1, 64)]
    elif not torch.cuda.is_available():
        return console.fail(PROG, "no CUDA device; --dry-run tries the command without one", args.json)
    else:
        device, name = torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
        tokens = prompts.PROMPT
        # the longest contexts matter most: only short ones are left out for lack of time
        shapes = [Shape(b, c) for c in sorted(contexts, reverse=True) for b in batches]
        if args.compile:
            launch_once(names, device)
            if args.json:
                console.show_json({"device": name, "compiled": names})
            return console.DONE
    results = Results(args.out, name, deadline=deadline, say=(lambda line: None) if args.json else say)
    # each part ends early if there is no time for a measurement without which it can say nothing
    with suppress(NoTime):
        table.run(device, names, shapes, results)
    with suppress(NoTime):
        table.run_prompts(device, names, tokens, results)
    with suppress(NoTime):
        chunks.run(device, names, results)
    if results.late:
        results.note("ran out of time; missing rows were not measured")
    if (numbers := results.path) is not None and results.known("copy", 0, 0):
        kept = Kept(name, torch.__version__, [*results.rows.values()])
        notes, facts = [gpu_report.KEPT, *results.notes], [("device", name), ("numbers", numbers.name)]
        gpu_report.write(PROG, args.out, [kept], lambda _: numbers.with_suffix(".png"), notes, arguments, facts)
    if args.json:
        console.show_json({"device": name, "rows": [asdict(row) for row in results.rows.values()]})
    return console.DONE


def with_kernels(chosen: Sequence[Choice]) -> list[str]:
    """`all` means the formats that have kernels; any other format is refused, and so are options."""
    served = [*decode.formats()]
    if chosen == formats()(ALL):
        return served
    for choice in chosen:
        if choice.options:
            raise ValueError(f"--formats {choice.label}: formats are measured with their defaults; leave options out")
        if choice.format not in served:
            raise ValueError(f"--formats: {choice.format} has no GPU kernels; these have: {', '.join(served)}")
    return [choice.format for choice in chosen]


def launch_once(formats: Sequence[str], device: torch.device) -> None:
    for name in formats:
        decoding = decode.packed_calls(name, Shape(1, 1024), device)[0][0]
        for call in (decoding, *prompts.prompt_calls(name, prompts.PROMPT, device)):
            call()
