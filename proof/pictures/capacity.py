"""How many times as many requests fit as with bf16, by their length, in a model of the shape of Llama-3.1-8B."""

from __future__ import annotations

import tempfile
from pathlib import Path

from proof.pictures.canvas import OTHERS, OURS, label, picture, tokens
from vllm_kvq.cli.plan import LENGTHS

FORMATS = ("kitty2", "innerq2", "squat4", "polar4")
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
OFFSETS = {"polar4": (6, 3), "squat4": (6, -4)}


def data() -> dict[str, list[tuple[int, float]]]:
    from transformers import LlamaConfig

    from vllm_kvq.integration.preview.budget import times_plain
    from vllm_kvq.integration.preview.dry_start import dry_start

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(folder)
        for name in FORMATS:
            # the same pages whatever platform draws them
            flags = ["--kv-cache-dtype", name, "--kv-cache-memory-bytes", "1M", "--block-size", "128"]
            served = dry_start([folder, *flags]).served
            found[name] = [(n, round(times_plain(served, n), 3)) for n in LENGTHS if n <= served.max_len]
    return found


def draw(path: Path) -> None:
    curves = data()
    with picture(path, curves, 1, (8, 3.8)) as (axes,):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), "o-", color=OURS, markersize=3.5, linewidth=1.4)
            label(axes, name, points[-1], OFFSETS.get(name, (6, 0)), OURS)
        contexts = [context for context, _ in points]
        for name, times in (("bf16", 1), ("fp8", 2)):
            axes.axhline(times, color=OTHERS, linewidth=1, linestyle="--")
            label(axes, name, (contexts[-1], times), (6, 7), OTHERS)
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [tokens(context) for context in contexts])
        axes.set_xlim(contexts[0] / 1.1, contexts[-1] * 1.9)
        axes.set_ylim(0, 6)
        axes.set_xlabel("tokens of a request")
        axes.set_ylabel("requests that fit, times bf16")
        axes.set_title("32 layers, 8 KV heads, head size 128, pages of 128 tokens", fontsize=10, loc="left")
