"""Decoding speed of the whole engine: tokens per second of each format against the plain bf16 cache.

    python -m vllm_kvq bench decode --model models/demo --formats kitty2

Two engines run at the same time, each in its own process, and take turns on the same prompts; the figure is the median
of the ratios of neighbouring turns, so a slow minute of the machine affects both. The time of a turn with one output
token is subtracted, which leaves the decode steps.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvq import console
from vllm_kvq.bench.names import add_formats


def _engine(model: str, kv_cache_dtype: str, max_len: int, batch: int, eager: bool) -> Any:
    from vllm import LLM

    return LLM(
        model,
        kv_cache_dtype=kv_cache_dtype,
        dtype="bfloat16",
        max_model_len=max_len,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        enforce_eager=eager,
    )


def _seconds(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench decode",
        "Decoding speed of the whole engine: tokens per second of each format against the plain bf16 cache.",
        ("--model models/demo", "--model .demo/model --formats kitty2,qjl3 --min-ratio 1 --json"),
        "a format decodes slower than --min-ratio",
    )
    p.add_argument("--model", required=True, help="checkpoint folder, for example models/demo")
    add_formats(p)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--context", type=int, default=512, help="prompt tokens per request")
    p.add_argument("--tokens", type=int, default=64, help="decoded tokens per request")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--min-ratio", type=float, default=0.0, help="ratio to bf16 below which the command exits with 1")
    p.add_argument("--eager", action="store_true", help="disable torch.compile")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if not (Path(args.model) / "config.json").is_file():
        p.error(f"--model {args.model!r} is no folder with a config.json; models/demo is one")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    rng = random.Random(0)
    prompts = [[rng.randrange(10, 500) for _ in range(args.context)] for _ in range(args.batch)]
    max_len = args.context + args.tokens + 64
    plain = _engine(args.model, "auto", max_len, args.batch, args.eager)
    slow: list[str] = []
    rows = []
    for name in args.formats:
        packed = _engine(args.model, name, max_len, args.batch, args.eager)
        speeds: dict[str, list[float]] = {"bf16": [], name: []}
        for turn in range(args.rounds + 1):  # the first warms up
            for label, llm in (("bf16", plain), (name, packed)):
                seconds = _seconds(llm, prompts, args.tokens + 1) - _seconds(llm, prompts, 1)
                if turn:
                    speeds[label].append(args.batch * args.tokens / seconds)
        ratio = statistics.median(b / a for a, b in zip(speeds["bf16"], speeds[name], strict=True))
        ours, plainly = (statistics.median(speeds[label]) for label in (name, "bf16"))
        rows.append({"format": name, "tokens_per_second": ours, "bf16_tokens_per_second": plainly, "ratio": ratio})
        if not args.json:
            print(
                f"{name}: {ours:.0f} tokens/s, bf16 {plainly:.0f} tokens/s, ratio {ratio:.2f} "
                f"(batch {args.batch}, context {args.context}, median of {args.rounds} rounds)",
                flush=True,
            )
        if ratio < args.min_ratio:
            slow.append(name)
        del packed
    if args.json:
        console.show_json({"batch": args.batch, "context": args.context, "rounds": args.rounds, "rows": rows})
    elif slow:
        print(f"slower than {args.min_ratio} of bf16: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
