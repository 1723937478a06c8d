"""`vllm-kvq bench gpu`: decode steps and prompts on a GPU, without vLLM."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from vllm_kvq import console
from vllm_kvq.bench.gpu import decode, prompts, table
from vllm_kvq.bench.gpu.decode import Shape
from vllm_kvq.bench.gpu.results import Results, say
from vllm_kvq.cli.bench.arguments import add_gpu_formats

OWN_SHAPES = {"dry-run": ("context", "batch", "compile"), "compile": ("context", "batch")}
"""Flags, and the arguments that they would ignore."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench gpu",
        "Decode times of the Triton and CUDA kernels on a GPU, against attention over bf16 and fp8 and against the\n"
        "copy bandwidth: 32 query heads on 8 KV heads of 128 channels. Needs PyTorch and Triton, but not vLLM.",
        ("--out docs/results", "--formats squat2,kitty2 --context 65536 --batch 1 8", "--dry-run"),
        "there is no GPU here",
    )
    add_gpu_formats(p)
    p.add_argument("--context", type=int, nargs="+", default=list(decode.CONTEXTS))
    p.add_argument("--batch", type=int, nargs="+", default=list(decode.BATCHES))
    p.add_argument("--seconds", type=float, default=300, help="time after which no measurement is started")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder that keeps every number; none is measured again")
    p.add_argument("--dry-run", action="store_true", help="use tiny shapes, without a GPU: the times mean nothing")
    p.add_argument("--compile", action="store_true", help="only launch everything once, to compile it")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if min(*args.context, *args.batch) < 1:
        p.error("contexts and batches must be at least 1")
    for flag, others in OWN_SHAPES.items():
        given = [name for name in others if getattr(args, name) is not p.get_default(name)]
        if getattr(args, flag.replace("-", "_")) and given:
            p.error(f"--{flag} launches shapes of its own; leave out {', '.join(f'--{name}' for name in given)}")
    deadline = time.monotonic() + args.seconds
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        device, name, tokens = torch.device("cpu"), "dry run: times mean nothing", 64
        shapes = [Shape(1, 64)]
    elif not torch.cuda.is_available():
        print("vllm-kvq bench gpu: no CUDA device; --dry-run tries the command without one", file=sys.stderr)
        return console.FOUND
    else:
        device, name = torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
        tokens = prompts.PROMPT
        # the longest contexts matter most: only short ones are left out for lack of time
        shapes = [Shape(b, c) for c in sorted(args.context, reverse=True) for b in args.batch]
        if args.compile:
            launch_once(args.formats, device)
            return console.DONE
    results = Results(args.out, name, say=(lambda line: None) if args.json else say)
    table.run(device, args.formats, shapes, deadline, results)
    table.run_prompts(device, args.formats, tokens, results)
    if args.json:
        console.show_json({"device": name, "rows": [asdict(row) for row in results.rows.values()]})
    return console.DONE


def launch_once(formats: Sequence[str], device: torch.device) -> None:
    for name in formats:
        decoding = decode.packed_calls(name, Shape(1, 1024), device)[0][0]
        for call in (decoding, *prompts.prompt_calls(name, prompts.PROMPT, device)):
            call()
