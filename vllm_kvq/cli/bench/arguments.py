"""Arguments that the bench commands share."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from vllm_kvq.cli.arguments import CHANNELS, whole_number, whole_numbers
from vllm_kvq.formats.table import suite

CHECKPOINT = "checkpoint folder, or `demo` for the repository's model"
OWN = "is always measured next to ours"
"""Why --formats takes none of vLLM's caches."""


def recommended() -> str:
    return suite("usual")[0]


def add_shape(p: argparse.ArgumentParser) -> None:
    """The shape of one layer's attention."""
    p.add_argument("--query-heads", type=whole_number, default=32, metavar="N", help="query heads of the layer")
    p.add_argument("--kv-heads", type=whole_number, default=8, metavar="N", help="KV heads of the layer")
    p.add_argument("--head-size", type=whole_number, default=128, metavar="D", help=CHANNELS)


def add_batch(p: argparse.ArgumentParser, default: str | None, note: str = "", several: bool = False) -> None:
    kind, metavar = (whole_numbers, "REQUESTS,...") if several else (whole_number, "REQUESTS")
    p.add_argument("--batch", type=kind, default=default, metavar=metavar, help=f"concurrent requests{note}")


def add_threads(p: argparse.ArgumentParser, default: int | None = None) -> None:
    """As many as torch takes, unless the command has a default of its own."""
    text = "threads that compute"
    p.add_argument("--threads", type=_threads, default=default or torch.get_num_threads(), metavar="N", help=text)


def _threads(text: str) -> int:
    if (count := whole_number(text)) > (cores := len(os.sched_getaffinity(0))):
        raise argparse.ArgumentTypeError(f"{count} is more than the {cores} cores of this machine")
    return count


def check_memory(p: argparse.ArgumentParser, context: int, token_bytes: int) -> None:
    """`token_bytes`: the bytes of one token in the 16-bit caches that are measured next to ours."""
    needed, memory = context * token_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory // 2:
        p.error(
            f"{context} tokens take {needed >> 30} GiB with bf16, and this machine has {memory >> 30}; lower --context"
        )


def add_rounds(p: argparse.ArgumentParser, default: int) -> None:
    text = "rounds, whose median is reported"
    p.add_argument("--rounds", type=whole_number, default=default, metavar="N", help=text)


def add_eager(p: argparse.ArgumentParser) -> None:
    p.add_argument("--eager", action="store_true", help="disable torch.compile")


def checkpoint(p: argparse.ArgumentParser, text: str, most: int) -> Path:
    """A folder that vLLM would read: not a model's name, because a benchmark downloads nothing.

    `most`: tokens of the longest request.
    """
    try:
        path = _checkpoint(text)
        config = json.loads((path / "config.json").read_text(encoding="utf-8") or "{}")
    except (ValueError, OSError) as error:
        p.error(str(error))
    limit = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(limit, int) and most > limit:
        p.error(f"{text} has {limit} positions, and requests take {most}; lower --context or --tokens")
    return path


def _checkpoint(text: str) -> Path:
    from vllm_kvq.eval.demo import demo_model
    from vllm_kvq.eval.model import DEMO

    if text == DEMO:
        return demo_model()
    path = Path(text)
    if path.is_file():
        raise ValueError(f"{text} is a file; name the folder that holds the checkpoint's config.json")
    if not text or not path.is_dir():
        raise ValueError(f"there is no folder {text!r}; {DEMO} is the repository's model")
    if not (path / "config.json").is_file():
        raise ValueError(f"the folder {text!r} has no config.json, so it holds no checkpoint")
    return path
