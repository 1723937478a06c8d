"""Loads of the GPU's attention over packed pages per cached token, counted while its PTX runs on a CPU (proof.ptx).

    python -m proof traffic         a table; --check: exit status 1 if not within LIMIT of a record

    loads      instructions of a warp
    asked      bytes, by all lanes: several may request the same
    sectors    bytes in sectors of 32, of each instruction: what the caches deliver
    memory     bytes in sectors that are requested at all: what memory delivers
    record     bytes that a token takes in a page, page headers and parameters included

The number of a token is the difference between contexts of eight and of four pages, so what a program reads once
(queries, tables) does not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from proof import ptx
from proof.ptx.memory import Tensors, Traffic
from vllm_kvq.bench.gpu.decode import formats
from vllm_kvq.cli.arguments import words
from vllm_kvq.formats import Geometry, get_format

LIMIT = 1.1
PAGE = 64
SHARE = 4
"""Query heads of a KV head."""


def count(name: str, head_size: int, pages: int) -> Traffic:
    from vllm_kvq.bench.pools import calibrated, random_pages
    from vllm_kvq.kernels.gpu.step import kernels_of

    fmt = calibrated(get_format(name).bind(Geometry(head_size, PAGE)), 1)
    kernels = kernels_of(fmt)
    if kernels is None:
        raise ValueError(f"{name} has no GPU kernel")
    cache, query = random_pages(fmt, pages, 1), torch.randn(1, 1, SHARE, head_size)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    Tensors.traffic = found = Traffic()
    try:
        kernels.attend_table(fmt, query, cache, table, torch.tensor([0]), torch.tensor([PAGE * pages]), 0.1, 1)
    finally:
        Tensors.traffic = None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    served = [name for name in formats() if "+" not in name]
    parser.add_argument("--formats", type=words(served), default=served, metavar="FORMAT,...")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--target", type=int, default=90, help="compute capability, as in 90")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    from vllm_kvq.kernels.gpu.loading import load

    ptx.emulate(args.target)
    load()
    line = "| {:<8} | {:>6} | {:>6} | {:>8} | {:>7} | {:>7} |"
    print(line.format("format", "loads", "asked", "sectors", "memory", "record"))
    print(line.format("---", *["--:"] * 5))
    good = True
    for name in args.formats:
        few, many = count(name, args.head_size, 4), count(name, args.head_size, 8)
        tokens = 4 * PAGE
        record = get_format(name).bind(Geometry(args.head_size, PAGE)).record_bytes / PAGE
        sectors = 32 * (many.sectors - few.sectors) / tokens
        memory = 32 * (len(many.touched) - len(few.touched)) / tokens
        found = [(many.asked - few.asked) / tokens, sectors, memory, record]
        print(line.format(name, f"{(many.loads - few.loads) / tokens:.2f}", *(f"{x:.1f}" for x in found)), flush=True)
        # less than a record would mean that loads were not counted
        good &= record / LIMIT <= memory <= sectors <= LIMIT * record
    return 1 if args.check and not good else 0
