"""`vllm-kvq bench prefill`: the cost of a prompt on top of its attention."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import torch

from vllm_kvq import console
from vllm_kvq.bench import prefill, vllm_build
from vllm_kvq.bench.prefill import ChunkRow, PromptRow
from vllm_kvq.cli.arguments import add_context, add_formats, from_zero
from vllm_kvq.cli.bench.arguments import OWN, add_rounds, add_shape, add_threads, check_memory, recommended
from vllm_kvq.formats import Geometry


def line(row: PromptRow | ChunkRow) -> str:
    if isinstance(row, PromptRow):
        return (
            f"{row.format:9} fit {row.fit_ms:7.1f} ms  pack {row.pack_ms:7.1f} ms  "
            f"attention: vLLM {row.vllm_ms:7.1f} ms, ours {row.ours_ms:7.1f} ms   "
            f"fit {row.fit_share:6.1%} + pack {row.pack_share:6.1%} of vLLM's"
        )
    return (
        f"{row.format:9} chunk of {row.tokens} after {row.context}: vLLM {row.vllm_ms:7.1f} ms, "
        f"ours {row.ours_ms:7.1f} ms   {row.ratio:5.2f} times vLLM's speed"
    )


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq bench prefill",
        "The cost of a prompt on top of its attention: fit, pack, and a later chunk's attention over packed history.\n"
        "Takes minutes with several formats or long contexts.",
        ("--formats all --context 4096", "--formats kitty2 --context 4096 --chunk 512 --json"),
        "could not be done",
    )
    add_formats(p, recommended(), OWN)
    add_context(p, "4096", "of the prompt, or before the chunk", several=True)
    text = "tokens per step after the context, measured instead of a prompt (default: 0, a prompt)"
    p.add_argument("--chunk", type=from_zero, default=0, metavar="TOKENS", help=text)
    add_shape(p)
    add_threads(p)
    add_rounds(p, 3)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    if args.query_heads % args.kv_heads:
        p.error(f"{args.query_heads} query heads can't share {args.kv_heads} KV heads evenly")
    try:
        Geometry(args.head_size, prefill.BLOCK)
    except ValueError as error:
        p.error(str(error))
    check_memory(p, max(args.context) + args.chunk, 8 * args.kv_heads * args.head_size)
    torch.set_num_threads(args.threads)
    if why := vllm_build.problem():
        return console.fail("vllm-kvq bench prefill", why, args.json)
    if not args.json:
        print(f"heads {args.query_heads}/{args.kv_heads}  d {args.head_size}  threads {args.threads}")
    rows: list[PromptRow | ChunkRow] = []
    for context in args.context:
        new = args.chunk or context
        q = torch.randn(new, args.query_heads, args.head_size).bfloat16()
        k, v = torch.randn(2, new, args.kv_heads, args.head_size).bfloat16()
        plain = prefill.Plain(q, k, v, context if args.chunk else 0)
        for choice in args.formats:
            name, options = choice.format, choice.options
            if args.chunk:
                rows.append(prefill.chunk_row(name, q, k, v, context, plain, args.rounds, options))
            else:
                rows.append(prefill.prompt_row(name, q, k, v, plain, args.rounds, options))
            if not args.json:
                print(line(rows[-1]), flush=True)
    if args.json:
        shape = {"query_heads": args.query_heads, "kv_heads": args.kv_heads, "head_size": args.head_size}
        console.show_json({**shape, "threads": args.threads, "rows": [asdict(row) for row in rows]})
    return console.DONE
