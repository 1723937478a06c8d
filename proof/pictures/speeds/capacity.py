"""How many times as many requests fit as with bf16, by their length, in a model of the shape of Llama-3.1-8B."""

from __future__ import annotations

import tempfile
from pathlib import Path

from proof.pictures.canvas import picture, tokens
from vllm_kvq.cli.plan import LENGTHS
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.table import suite
from vllm_kvq.naming import OTHERS, OURS, Name, name_curves

MOST = 6
"""More curves than that can't be told apart."""
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def formats() -> list[str]:
    """Those of budgets, then the usual ones, as many as can be told apart."""
    of_budgets = [name for budget in BUDGETS.values() for name in budget.formats]
    return [*dict.fromkeys((*of_budgets, *suite("usual")))][:MOST]


def data() -> dict[str, list[tuple[int, float]]]:
    """Formats whose numbers are the same share a curve."""
    from transformers import LlamaConfig

    from vllm_kvq.integration.preview.budget import times_plain
    from vllm_kvq.integration.preview.dry_start import dry_start

    found: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(folder)
        for name in formats():
            # the same pages whatever platform draws them
            flags = ["--kv-cache-dtype", name, "--kv-cache-memory-bytes", "1M", "--block-size", "128"]
            served = dry_start([folder, *flags]).served
            found[name] = [(n, round(times_plain(served, n), 3)) for n in LENGTHS if n <= served.max_len]
    return found


def draw(path: Path) -> None:
    curves = data()
    with picture(path, curves, 1, (8, 4.2)) as (axes,):
        for points in curves.values():
            axes.plot(*zip(*points, strict=True), "o-", color=OURS, markersize=3.5, linewidth=1.4)
        contexts = [context for context, _ in points]
        plain = {"bf16": 1, "fp8": 2}
        for times in plain.values():
            axes.axhline(times, color=OTHERS, linewidth=1, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [tokens(context) for context in contexts])
        axes.set_xlim(contexts[0] / 1.1, contexts[-1] * 1.03)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of a request")
        axes.set_ylabel("requests that fit, times bf16")
        axes.set_title("32 layers, 8 KV heads, head size 128, pages of 128 tokens", fontsize=10, loc="left")
        ends = [Name(name, points[-1], OURS) for name, points in curves.items()]
        name_curves(axes, [*ends, *(Name(name, (contexts[-1], times), OTHERS) for name, times in plain.items())])
