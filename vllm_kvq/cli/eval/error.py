"""Score errors of formats on synthetic data: `vllm-kvq eval error`.

The relative error of q . K when every token is quantized, without windows or sinks, for queries that the
format has not seen: SQuat's subspace is fitted on the first half of the queries, and the error is measured on the
second. Constants are fitted to other tokens of the same heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_kvq import console
from vllm_kvq.cli.arguments import FORMATS as HELP
from vllm_kvq.cli.arguments import formats, whole_number
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.heads.synthetic import attention_data, score_error
from vllm_kvq.formats import FORMATS, Geometry, roundtrip
from vllm_kvq.formats.constants import Calibration
from vllm_kvq.formats.methods.squat import PLAIN
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.table import public_formats

Row = tuple[str, str, Mapping[str, Any]]

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "squat2": {
        "plain": PLAIN,
        "plain, four blocks": {**PLAIN, "blocks": 4},
        "plain, r = 16": {**PLAIN, "r": 16},
        "paper": {**PLAIN, "floor": 0},
        "paper, r = 16": {**PLAIN, "floor": 0, "r": 16},
        "plain, before RoPE": {**PLAIN, "rope": "before"},
        "plain, fitted": {**PLAIN, "key_scales": "fitted"},
        "plain, fitted, token scale": {**PLAIN, "key_scales": "fitted", "token_scale": "balanced"},
        "four blocks": {"blocks": 4},
        "r = 20": {"r": 20},
        "half": {"boost": "half"},
    },
    "squat4": {"fitted": {"key_scales": "fitted"}},
    "qjl3": {
        "by slab": {"outlier_choice": "slab"},
        "independent rows": {"sketch": "gaussian"},
        "no outliers": {"outliers": 0},
    },
    "polar3": {"paper": {"mode": "paper"}, "m3n2": {"angle_bits": 3}},
    "kivi2": {"fitted": {"key_scales": "fitted"}},
    "kitty2": {"half": {"boost": "half"}},
}
"""A format's variants that deserve their own row."""
SEEDS = 4
TOKENS, CALIBRATED = 256, 2048
"""Tokens that are measured, and those before them to which constants are fitted."""
CASES = [(128, False), (128, True), (64, False), (64, True)]


def rows() -> list[Row]:
    """Every format of the table, followed by its variants."""
    found: list[Row] = []
    for fmt in public_formats():
        found.append((fmt.name, fmt.name, {}))
        found += [(f"{fmt.name}, {said}", fmt.name, options) for said, options in VARIANTS.get(fmt.name, {}).items()]
    return found


def asked(found: Sequence[Choice]) -> list[Row]:
    """The candidates in `--formats`; ValueError for those that can't be measured this way."""
    for choice in found:
        for d, _ in CASES:
            x = torch.zeros(1, 1, d)
            roundtrip(choice.format, x, x, x, calibration=Calibration(x, x, x), **choice.options)
    return [(choice.label, choice.format, dict(choice.options)) for choice in found]


def options_for(options: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """`blocks` is our shorthand for the `g` that gives this number of blocks."""
    rest = {k: v for k, v in options.items() if k != "blocks"}
    return {**rest, "g": head_size // options["blocks"]} if "blocks" in options else rest


def error(name: str, options: Mapping[str, Any], head_size: int, rope: bool, seeds: int = SEEDS) -> float:
    """The error averaged over `seeds` data sets."""
    errors = []
    for seed in range(seeds):
        calibration, (query, key, value) = _data(name, options, head_size, rope, seed)
        seen, new = query[: len(query) // 2], query[len(query) // 2 :]
        turned = Rope.plain(head_size, len(key)) if rope else None
        key_hat, _ = roundtrip(
            name, key, value, seen, turned, calibration=calibration, **options_for(options, head_size)
        )
        errors.append(score_error(new, key, key_hat))
    return sum(errors) / seeds


def _data(
    name: str, options: Mapping[str, Any], head_size: int, rope: bool, seed: int
) -> tuple[Calibration | None, Sequence[torch.Tensor]]:
    """What constants are fitted to, if there are any, and what is measured."""
    settings = FORMATS[name].settings(options_for(options, head_size))
    if not settings.calibrated:
        return None, attention_data(head_size, TOKENS, rope=rope, seed=seed)
    data = attention_data(head_size, CALIBRATED + TOKENS, rope=rope, seed=seed)
    return Calibration(*(x[:CALIBRATED] for x in data)), [x[CALIBRATED:] for x in data]


def key_bits(name: str, options: Mapping[str, Any], head_size: int) -> float:
    return FORMATS[name].bind(Geometry(head_size, 64), options_for(options, head_size)).half_bits_per_element("keys")


def symmetric_share(head_size: int) -> tuple[float, float]:
    """The shares of InnerQ's groups of keys and of values that take the symmetric mode."""
    _, key, value = attention_data(head_size)
    page = FORMATS["innerq2"].bind(Geometry(head_size, 64))
    k, v = (page.widen(x.transpose(0, 1))[0] for x in (key, value))
    fields = page.pack(k, v, page.keys.fit(k, k, None))
    keys, values = (fields[n].signbit().double().mean().item() for n in ("k_scale", "v_scale"))
    return keys, values


def parser() -> argparse.ArgumentParser:
    p = console.parser(
        "vllm-kvq eval error",
        "Score errors of formats on synthetic data, every token quantized. Takes minutes with all formats.",
        ("", "--formats squat2:r=40,floor=0,innerq2:quant_mode=symmetric", "--json"),
        "the command failed",
    )
    text = f"{HELP} (default: all formats and selected variants)"
    p.add_argument("--formats", type=formats("has no error here to measure"), metavar="FORMAT,...", help=text)
    text = "number of data sets to average over"
    p.add_argument("--seeds", type=whole_number, default=SEEDS, metavar="N", help=text)
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    try:
        chosen = asked(args.formats) if args.formats else rows()
    except ValueError as problem:
        p.error(str(problem))
    found: list[dict[str, Any]] = []
    for label, name, options in chosen:
        errors = [error(name, options, d, rope, args.seeds) for d, rope in CASES]
        bits = key_bits(name, options, 128)
        found.append({"row": label, "format": name, "options": options, "key_bits": bits, "errors": errors})
    plain = ("innerq2", {}) in [(name, options) for _, name, options in chosen]
    shares = {d: symmetric_share(d) for d in (64, 128)} if plain else {}
    if args.json:
        cases = [{"head_size": d, "rope": rope} for d, rope in CASES]
        symmetric = [{"head_size": d, "keys": keys, "values": values} for d, (keys, values) in shares.items()]
        console.show_json({"cases": cases, "rows": found, "symmetric_share_of_innerq2": symmetric})
        return console.DONE
    head = ["format", "bits/key", *(f"d={d}{' + RoPE' if rope else ''}" for d, rope in CASES)]
    cells = [[f["row"], f"{f['key_bits']:.2f}", *(f"{e:.3f}" for e in f["errors"])] for f in found]
    console.Table(head, cells).show()
    for d, (keys, values) in shares.items():
        print(f"innerq2, d={d}: {keys:.1%} of the key groups and {values:.1%} of the value groups are symmetric")
    return console.DONE
