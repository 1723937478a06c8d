"""Score errors of formats on the synthetic data: `vllm-kvq eval error`.

The relative error of q . K when every token is quantized, without windows and sinks, for queries that the
format has not seen: SQuat's subspace is fitted on the first half of the queries, the error is measured on the
second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_kvq.eval.synthetic import attention_data, score_error
from vllm_kvq.formats import FORMATS, Geometry, roundtrip

Row = tuple[str, str, dict[str, Any]]

ROWS: list[Row] = [
    ("kivi2", "kivi2", {}),
    ("squat2", "squat2", {}),
    ("squat2, four blocks", "squat2", {"blocks": 4}),
    ("polar3", "polar3", {}),
    ("polar3, paper", "polar3", {"mode": "paper"}),
    ("qjl3", "qjl3", {}),
    ("qjl3, by slab", "qjl3", {"outlier_choice": "slab"}),
    ("innerq2", "innerq2", {}),
    ("polar4", "polar4", {}),
    ("polar4, paper", "polar4", {"mode": "paper"}),
    ("kivi4", "kivi4", {}),
    ("squat4", "squat4", {}),
]
"""The built-in formats, and variants worth a row of their own."""
SEEDS = 4
CASES = [(128, False), (128, True), (64, False), (64, True)]


def rows() -> list[Row]:
    """Those above, and other packages' formats as they are."""
    listed = {name for _, name, _ in ROWS}
    return ROWS + [(f.name, f.name, {}) for f in FORMATS.values() if f.public and f.name not in listed]


def options_for(options: dict[str, Any], head_size: int) -> dict[str, Any]:
    """`blocks` is our shorthand for the `g` that gives so many blocks."""
    rest = {k: v for k, v in options.items() if k != "blocks"}
    return {**rest, "g": head_size // options["blocks"]} if "blocks" in options else rest


def error(name: str, options: dict[str, Any], head_size: int, rope: bool) -> float:
    """Averaged over `SEEDS` data sets."""
    errors = []
    for seed in range(SEEDS):
        query, key, value = attention_data(head_size, rope=rope, seed=seed)
        seen, new = query[: len(query) // 2], query[len(query) // 2 :]
        key_hat, _ = roundtrip(name, key, value, seen, **options_for(options, head_size))
        errors.append(score_error(new, key, key_hat))
    return sum(errors) / SEEDS


def key_bits(name: str, options: dict[str, Any], head_size: int) -> float:
    return FORMATS[name].bind(Geometry(head_size, 64), options_for(options, head_size)).key_bits_per_element()


def symmetric_share(head_size: int) -> tuple[float, float]:
    """The share of InnerQ's groups of keys and of values that take the symmetric mode."""
    _, key, value = attention_data(head_size)
    page = FORMATS["innerq2"].bind(Geometry(head_size, 64))
    k, v = (page.widen(x.transpose(0, 1))[0] for x in (key, value))
    fields = page.pack(k, v, page.keys.fit(k, k, None))
    keys, values = (fields[n].signbit().double().mean().item() for n in ("k_scale", "v_scale"))
    return keys, values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="vllm-kvq eval error", description=__doc__.partition("\n")[0])
    known = dict.fromkeys(name for _, name, _ in rows())
    parser.add_argument("--format", nargs="+", choices=list(known), default=list(known), help="all unless named")
    chosen = parser.parse_args(arguments).format
    cases = [f"d={d}{' + RoPE' if rope else ''}" for d, rope in CASES]
    print(f"{'format':<22}{'bits/key':>9}" + "".join(f"{c:>15}" for c in cases))
    for label, name, options in rows():
        if name not in chosen:
            continue
        errors = [error(name, options, d, rope) for d, rope in CASES]
        print(f"{label:<22}{key_bits(name, options, 128):>9.2f}" + "".join(f"{e:>15.3f}" for e in errors))
    for d in (64, 128) if "innerq2" in chosen else ():
        keys, values = symmetric_share(d)
        print(f"innerq2, d={d}: {keys:.1%} of the key groups and {values:.1%} of the value groups are symmetric")


if __name__ == "__main__":
    main()
