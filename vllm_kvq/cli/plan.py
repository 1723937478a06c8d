"""`vllm-kvq plan`: what a server would hold with each format, from a model's config.json, for machines that are not
here."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvq import console
from vllm_kvq.cli.arguments import ALL, UNITS, add_context, add_formats, add_out, formats, size, whole_number
from vllm_kvq.cli.check.config_file import FLAG as CONFIG
from vllm_kvq.cli.check.words import all_words, listed_words, normal, values, wrong_models, wrong_words
from vllm_kvq.cli.logs import be_quiet
from vllm_kvq.cli.page.plots import IF_INSTALLED, pictures
from vllm_kvq.formats.table import DEFAULT_N

if TYPE_CHECKING:
    from vllm_kvq.eval.choice import Choice
    from vllm_kvq.integration.preview.budget import Row, Wanted
    from vllm_kvq.integration.preview.dry_start import DryStart

GIB = UNITS["G"]
LENGTHS = tuple(1 << n for n in range(8, 21))
"""Tokens of the requests of the plot: 256 to a million, as far as the model goes."""


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq plan",
        "What each format would hold on any machine, not necessarily this one: tokens, concurrent requests, bytes.\n"
        "Reads the model's config.json only. Takes half a minute. All other flags are those of vllm serve.",
        (
            "MODEL --gpu-memory 80G --context 32768 --concurrency 64",
            "MODEL --gpu-memory 80G --tp 4 --formats kitty2,polar4 --json",
            "MODEL --cache-bytes 40G --context 8192 --out plan",
        ),
        "no format can serve this model, or nothing is left for the cache",
    )
    p.usage = "vllm-kvq plan MODEL [options] [any flag of vllm serve]"
    p.add_argument("model", metavar="MODEL", help="model name, or a folder with its config.json")
    add_formats(p, ALL, "is always included")
    memory = p.add_mutually_exclusive_group()
    memory.add_argument("--gpu-memory", metavar="SIZE", type=size, help="memory of one GPU, as in 80G (default: none)")
    memory.add_argument(
        "--cache-bytes", metavar="SIZE", type=size, help="memory of the cache on each rank, as in 40G (default: none)"
    )
    p.add_argument(
        "--weights",
        metavar="SIZE",
        type=size,
        help="bytes of the model's weights (default: its files' or its parameters')",
    )
    add_context(p, None, "per request (default: the model's maximum)")
    p.add_argument("--concurrency", metavar="N", type=whole_number, help="concurrent requests (default: none)")
    p.add_argument("--tp", metavar="N", type=whole_number, default=1, help="ranks that share the heads")
    p.add_argument("--pp", metavar="N", type=whole_number, default=1, help="ranks that share the layers")
    add_out(p, f"plan.json, and plan.png, a plot by context, {IF_INSTALLED}")
    console.add_json(p)
    return p


RANKS = {"--tensor-parallel-size": "--tp", "--pipeline-parallel-size": "--pp"}
OWN = {
    "--kv-cache-dtype": "--formats",
    "--kv-cache-memory-bytes": "--cache-bytes",
    **RANKS,
    "-tp": "--tp",
    "-pp": "--pp",
}
"""Flags of vllm serve that have another name here."""


def ignored(options: argparse.Namespace, given: Sequence[str], more: Sequence[str]) -> str | None:
    """A sentence about an argument that would change nothing. A server's `--config` may name a format and the cache's
    memory, which a plan asks for anew; it may not name ranks of which the plan would not know."""
    words = normal(more)
    for flag, own in OWN.items():
        if values(words, flag):
            return f"{flag} is {own} here"
    listed = listed_words(words)
    for flag, own in RANKS.items():
        if (ranks := values(listed, flag)) and not values(given, own):
            return f"in {values(words, CONFIG)[-1]}, {flag} is {ranks[-1]}, which is {own} here; add {own} {ranks[-1]}"
    if options.weights and not options.gpu_memory:
        return "--weights is subtracted from --gpu-memory, which is not given; leave it out"
    return None


def names(p: argparse.ArgumentParser, chosen: Sequence[Choice]) -> list[str]:
    """`all` gives the formats in the order of `vllm-kvq check`."""
    from vllm_kvq.cli.check.every import ranked  # imports vllm

    if chosen == formats()(ALL):
        return ranked()
    if options := [choice.label for choice in chosen if choice.options]:
        p.error(f"--formats {options[0]}: options apply to all formats here; set them with --additional-config")
    return [choice.format for choice in chosen]


@dataclass(frozen=True)
class Outcome:
    """What is planned for one model."""

    model: str
    wanted: Wanted
    memory: str | None
    """Where the cache's bytes come from."""
    rows: Sequence[Row]
    refused: Mapping[str, str]
    losses: Mapping[str, float]
    where: str
    """Where the losses were measured."""
    briefly: str
    """What requests take only while a prompt is computed, in words; none for dense models."""
    by_context: Mapping[str, Sequence[tuple[int, float]]]
    """How many times as many requests fit as with bf16, by their tokens."""

    def document(self) -> dict[str, Any]:
        return {
            "model": self.model,
            **asdict(self.wanted),
            "memory": self.memory,
            "caches": [asdict(row) | {"kl": self.losses.get(row.name)} for row in self.rows],
            "refused": dict(self.refused),
            "kl_measured_on": self.where,
            "times_bf16_by_context": {name: dict(points) for name, points in self.by_context.items()},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    p = parser()
    options, more = p.parse_known_args(given)
    words = [options.model, *more]
    if problem := wrong_words(words) or ignored(options, given, more) or wrong_models(words):
        p.error(problem)
    be_quiet()
    found = planned(p, options, more)
    if isinstance(found, str):
        if options.json:
            return console.fail("vllm-kvq plan", found, as_json=True)
        print(f"no: {found}")
        return console.FOUND
    if options.json:
        console.show_json(found.document())
    else:
        show(found)
    if options.out:
        _write(options.out, found)
    return console.DONE


def _write(folder: Path, found: Outcome) -> None:
    from vllm_kvq.eval.results.plots import by_context

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(found.document(), indent=2) + "\n", encoding="utf-8")
    what = "requests that fit, times bf16"
    pictures(lambda: [by_context(folder / "plan.png", found.by_context, found.model, what)])


def planned(p: argparse.ArgumentParser, options: argparse.Namespace, more: Sequence[str]) -> Outcome | str:
    """The outcome, or why there is none."""
    from vllm_kvq.integration.preview.dry_start import WouldNotStart, WrongUsage, dry_start, without_kernels

    words = [options.model, *more, f"--tensor-parallel-size={options.tp}", f"--pipeline-parallel-size={options.pp}"]
    words += ["--max-model-len", str(options.context)] if options.context else []
    # nothing here depends on it, and vLLM's default may not be free
    words += ["--kv-cache-memory-bytes", "1M"]
    if options.gpu_memory and not values(all_words(more), "--block-size"):
        words += ["--block-size", str(DEFAULT_N)]
    starts: dict[str, DryStart] = {}
    refused: dict[str, str] = {}
    for name in names(p, options.formats):
        try:
            with without_kernels():
                starts[name] = dry_start([*words, "--kv-cache-dtype", name])
        except WrongUsage as error:
            p.error(str(error))
        except WouldNotStart as error:
            refused[name] = str(error)
    if not starts:
        sentences = dict.fromkeys(refused.values())
        return "; ".join(sentences)
    return _outcome(p, options, more, starts, refused)


def _plain_block(options: argparse.Namespace, more: Sequence[str]) -> int | None:
    """Tokens of a block of vLLM's own cache; None: as many as vLLM takes on this machine."""
    from vllm_kvq.integration.preview.plain import USUAL_BLOCK

    if given := values(all_words(more), "--block-size"):
        return int(given[-1])
    return USUAL_BLOCK if options.gpu_memory else None


def _outcome(
    p: argparse.ArgumentParser,
    options: argparse.Namespace,
    more: Sequence[str],
    starts: Mapping[str, DryStart],
    refused: Mapping[str, str],
) -> Outcome | str:
    from vllm_kvq.integration.advice.losses import nearest
    from vllm_kvq.integration.preview import budget

    first = next(iter(starts.values()))
    config, served = first.vllm_config, first.served
    cache, because = options.cache_bytes, "--cache-bytes" if options.cache_bytes else None
    if options.gpu_memory:
        model = budget.Weights(options.weights, False) if options.weights else budget.weights(config)
        if model is None:
            p.error("the size of the model's weights is not known without its files; set it with --weights 140G")
        cache, because = budget.cache_of(options.gpu_memory, config, model)
        if cache <= 0:
            return budget.too_small(because)
    wanted = budget.Wanted(served.max_len, options.concurrency, cache, options.pp)
    block = _plain_block(options, more)
    rows = [budget.plain(served, config, wanted, bits, block) for bits in (16, 8)]
    rows += [budget.packed(start.served, wanted) for start in starts.values()]
    like = nearest(served, config)
    losses = {
        row.name: like.kl[name] for name, row in zip(("bf16", "fp8", *starts), rows, strict=True) if name in like.kl
    }
    lengths = [length for length in LENGTHS if length <= served.max_len]
    curves = {
        start.served.label: [(n, budget.times_plain(start.served, n)) for n in lengths] for start in starts.values()
    }
    briefly = " and ".join(["windows"] * bool(served.layers.windows) + ["states"] * bool(served.states))
    return Outcome(config.model_config.model, wanted, because, rows, refused, losses, like.where, briefly, curves)


def show(found: Outcome) -> None:
    wanted = found.wanted
    print(f"{found.model}, requests of {wanted.context:,} tokens")
    if wanted.cache_bytes is not None:
        print(f"cache on each rank: {wanted.cache_bytes / GIB:.1f} GiB ({found.memory})")
    head = ["cache", "bits", "bytes a\ntoken", "MiB a\nrequest"]
    head += ["tokens", "requests", "x bf16"] if wanted.cache_bytes is not None else []
    head += [f"GiB for\n{wanted.concurrency}"] if wanted.concurrency is not None else []
    head += ["KL"]
    lines = max(title.count("\n") for title in head)
    aligned = ["\n" * (lines - title.count("\n")) + title for title in head]
    print()
    console.Table(aligned, [_cells(row, found) for row in found.rows]).show()
    print(f"\nKL: on {found.where}")
    for sentence in _vllms_words(found):
        print(console.folded(sentence, shutil.get_terminal_size().columns))
    for name, sentence in found.refused.items():
        print(f"{name}: {sentence}")


def _vllms_words(found: Outcome) -> list[str]:
    """What vLLM's own lines will say of the same caches, where that differs."""
    if found.wanted.cache_bytes is None:
        return []
    others = [f"{row.name} {row.vllm_tokens:,}" for row in found.rows if row.vllm_tokens not in (None, row.tokens)]
    short = [row.name for row in found.rows if row.vllm_tokens is None]
    counted = (
        f"vLLM's own line 'KV cache size' will say {', '.join(others)}, because it counts for every request all that "
        f"{found.briefly} take while a prompt is computed"
    )
    refused = (
        f"{', '.join(short)}: vLLM will not start, because no request of {found.wanted.context:,} tokens fits next to "
        "the block that it reserves; lower --context or give the cache more memory"
    )
    return [counted] * bool(others) + [refused] * bool(short)


def _cells(row: Row, found: Outcome) -> tuple[str, ...]:
    wanted, plain = found.wanted, found.rows[0]
    cells = [row.name, f"{row.bits:.2f}", f"{row.token_bytes:,.0f}", _number(row.request_bytes / UNITS["M"])]
    if row.tokens is not None:
        ratio = row.tokens / plain.tokens if plain.tokens else 0.0
        cells += [f"{row.tokens:,}", _number(row.tokens / wanted.context), f"{ratio:.1f}"]
    if row.needed is not None:
        cells.append(_number(row.needed / GIB))
    return (*cells, console.short(found.losses[row.name]) if row.name in found.losses else "-")


def _number(value: float) -> str:
    """With a decimal where it says something, so that a table of all columns fits a terminal."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
