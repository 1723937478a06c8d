"""`vllm-kvq eval MODEL --lm-eval TASK,...`: each format on tasks of lm-evaluation-harness, stored like all results."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvq.cli.arguments import whole_number
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import named
from vllm_kvq.eval.lm_tasks import LmEval, LmEvalFailed, rows
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.results.result import DECODING, Row
from vllm_kvq.eval.run.comparison import LEAST_CACHE_BYTES
from vllm_kvq.eval.run.plan import REQUESTS
from vllm_kvq.eval.run.store import Store, format_sources, sources
from vllm_kvq.eval.run.store import key as key_of
from vllm_kvq.formats.table import PLAIN
from vllm_kvq.integration.preview.constants import Known

if TYPE_CHECKING:
    from vllm_kvq.eval.run.harness import Progress

KIND = "lm-eval"
OTHERS = ("tasks", "sequences", "regimes", "readers", "answers", "tokens", "top")
"""Options that apply only to our own tasks."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--lm-eval",
        metavar="TASK,...",
        help="tasks of lm-evaluation-harness (an extra) instead of ours (default: none)",
    )
    p.add_argument("--lm-eval-path", type=Path, metavar="DIR", help="folder of additional task files (default: none)")
    p.add_argument("--lm-eval-limit", type=whole_number, metavar="N", help="maximum questions per task (default: all)")


def wrong_usage(args: argparse.Namespace) -> str | None:
    """Checks the arguments before defaults replace those that were not given."""
    if not args.lm_eval:
        given = [name for name in ("lm_eval_path", "lm_eval_limit") if getattr(args, name) is not None]
        return f"--{given[0].replace('_', '-')} is for --lm-eval" if given else None
    given = [name for name in OTHERS if getattr(args, name) is not None] + ["quick"] * args.quick
    return f"--{given[0]} is for our own tasks, not for --lm-eval" if given else None


def evaluated(
    args: argparse.Namespace, model: Model, choices: tuple[Choice, ...], store: Store, progress: Progress
) -> Iterator[Row]:
    """Raises LmEvalFailed if lm-evaluation-harness is missing, or if not even the 16-bit cache gives figures."""
    context = min(max(args.context), model.longest)
    engine: dict[str, Any] = {
        "pretrained": str(model.folder),
        "dtype": model.dtype,
        "max_model_len": context,
        "max_num_batched_tokens": args.chunk,
        "max_num_seqs": REQUESTS,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": max(LEAST_CACHE_BYTES, 2 * REQUESTS * context * model.token_bytes),
        "seed": args.seed,
    }
    servers = Known(str(model.folder), model.dtype)
    harness = LmEval(tuple(args.lm_eval.split(",")), args.lm_eval_path, args.lm_eval_limit, engine)
    for choice in choices:
        progress(f"{choice.label}: {args.lm_eval}", 0)
        try:
            found = _kept(harness, choice, model, store, servers)
            yield from rows(found, model.name, choice, context, _bits(model, choice, context))
        except LmEvalFailed as error:
            if choice.format == PLAIN:
                raise
            about = (model.name, choice.format, choice.options, args.lm_eval, DECODING, context, 0, None)
            yield Row(*about, problem=str(error))
        progress(choice.label, 1)


def _kept(harness: LmEval, choice: Choice, model: Model, store: Store, servers: Known) -> dict[str, Any]:
    """The harness's results, new or from earlier runs."""
    key = key_of(
        model=model.digest(),
        format=choice.format,
        options=dict(choice.options),
        sources=sources(),
        format_sources=format_sources(choice.format),
        tasks=harness.tasks,
        include=_digest(harness.include),
        limit=harness.limit,
        engine=dict(harness.engine),
        harness=version("lm-eval"),
        **named(choice, servers),
    )
    if (arrays := store.get(KIND, key)) is None:
        text = json.dumps(harness.run(choice)).encode()
        store.put(KIND, key, arrays := {"json": np.frombuffer(text, dtype=np.uint8)})
    found: dict[str, Any] = json.loads(arrays["json"].tobytes())
    return found


def _digest(folder: Path | None) -> str | None:
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _bits(model: Model, choice: Choice, context: int) -> float | None:
    import torch

    from vllm_kvq.eval.bits import plain_bits, served_bits
    from vllm_kvq.integration.preview.dry_start import WouldNotStart

    if not choice.ours:
        return plain_bits(choice.format, getattr(torch, model.dtype))
    try:
        return served_bits(str(model.folder), choice, model.dtype, context)
    except WouldNotStart:
        return None
