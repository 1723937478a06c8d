"""Writes key biases like Qwen2's, and wide channels, into a Llama without changing what it computes.

    python -m proof biases MODEL OUT [--only biases|channels|both] [--seed 0]

A regression test for formats, not a substitute for a large model: the additions contribute nothing to a score. Wide
channels of keys meet queries that are smaller by the same factor, and biases are where queries are zero, so an error in
them weighs less than in real models, where queries and keys are large in the same channels.

* **Wide channels of keys.** Rows i and i + d/2 of W_K, the pair that RoPE rotates together, times s; the same rows
  of W_Q, in all query heads that read this KV head, divided by s.
* **Wide channels of values.** A row of W_V times s, the columns of W_O that read it divided by s.
* **Biases of keys, as Qwen2's.** A bias b adds q . R(t) b to the score of token t, so it changes nothing only where q
  is zero: in pairs whose rows of W_Q are zero. A model is trained so that there are such pairs (`masked_pairs`).

Biases that a model has already are scaled with their rows. All scales are powers of two, by which floating-point
numbers are multiplied exactly: in bfloat16, too, the model with a 16-bit cache gives the same tokens as before.

The figures (`Profile`) are multiples of the median channel's root mean square. QJL's paper sees "approximately four"
wide channels of 128 in deeper layers of Llama-2, and PolarQuant's sees them stand in pairs; both show sizes only in
pictures. Measured on Qwen2.5: 4 to 6 % of a middle layer's channels are larger than three times the median, one
channel of layer 0 is 272 where the median is 1.7 (github.com/TheTom/turboquant_plus/issues/45); the bias of keys has a
norm of 605 in the first layer, 921 in the last, and about 22 between (github.com/ggml-org/llama.cpp/issues/21385).
Values have no strongly different channels in any of these.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from proof.demo.llama import forward, shape_of
from vllm_kvq.bench.models.checkpoint import LlamaShape

TEXT = Path(__file__).parents[2] / "README.md"
PARTS = ("biases", "channels", "both")
"""The parts that can be written."""
TOKENS = 512
"""The number of that text's tokens from which channels' sizes are measured."""


@dataclass(frozen=True)
class Profile:
    """The sizes of the additions, as multiples of the head's median channel."""

    key_ratios: tuple[float, ...] = (16.0, 8.0)
    """Ratios of wide pairs, for every 64 channels of a head: 6 % of the channels."""
    value_ratios: tuple[float, ...] = (4.0,)
    """Ratios of wide channels, for every 64 channels of a head."""
    outer_bias: float = 160.0
    """The bias in the first and the last layer; 0 for none."""
    inner_bias: float = 4.0
    """The bias in the layers between."""

    def __post_init__(self) -> None:
        if any(ratio < 1 for ratio in (*self.key_ratios, *self.value_ratios)):
            raise ValueError("a channel that is smaller than the median is not wide: ratios must be at least 1")
        if min(self.outer_bias, self.inner_bias) < 0:
            raise ValueError("the size of a bias must not be negative")

    @classmethod
    def only(cls, what: str) -> Profile:
        """One of `PARTS`."""
        channels, biases = what != "biases", what != "channels"
        if what not in PARTS:
            raise ValueError(f"{what!r} is not one of {', '.join(PARTS)}")
        whole = cls()
        return cls(
            key_ratios=whole.key_ratios if channels else (),
            value_ratios=whole.value_ratios if channels else (),
            outer_bias=whole.outer_bias if biases else 0.0,
            inner_bias=whole.inner_bias if biases else 0.0,
        )

    @property
    def biased(self) -> bool:
        return self.outer_bias > 0 or self.inner_bias > 0


@dataclass(frozen=True)
class Hardness:
    """Figures of one KV head's keys or values, (tokens, channels)."""

    kurtosis: float
    """E[x^4] / E[x^2]^2 over all elements: 3 for a normal distribution."""
    ratio: float
    """The largest channel's root mean square divided by the median channel's."""

    @classmethod
    def of(cls, x: Tensor) -> Hardness:
        square, sizes = x.double().square(), channel_sizes(x)
        kurtosis = square.square().mean() / square.mean().square()
        return cls(kurtosis.item(), (sizes.max() / sizes.median()).item())


def channel_sizes(x: Tensor) -> Tensor:
    """(..., tokens, channels) -> the root mean square of each channel."""
    return x.double().square().mean(-2).sqrt()


@torch.no_grad()
def cached(shape: LlamaShape, weights: Mapping[str, Tensor], ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each layer's keys and values, (KV heads, tokens, head size), of tokens `ids` (tokens,)."""
    found: list[tuple[Tensor, Tensor]] = []
    forward(shape, weights, ids[None], tap=lambda query, key, value: found.append((key[0], value[0])))
    return found


def masked_pairs(shape: LlamaShape, weights: Mapping[str, Tensor], layer: int, head: int) -> list[int]:
    """The pairs (i, i + d/2) of a KV head that are zero in all queries."""
    half = shape.head_dim // 2
    p = f"model.layers.{layer}.self_attn.q_proj."
    rows = weights[p + "weight"].abs().sum(1)
    if p + "bias" in weights:
        rows = rows + weights[p + "bias"].abs()
    read = rows.view(shape.kv_heads, -1, 2, half)[head].sum((0, 1))
    return [i for i in range(half) if read[i] == 0]


def rewritten(
    shape: LlamaShape, weights: Mapping[str, Tensor], ids: Tensor, profile: Profile | None = None, seed: int = 0
) -> tuple[LlamaShape, dict[str, Tensor]]:
    """The same function in other weights; sizes are measured on tokens `ids`.

    Raises ValueError if biases are requested and a head has no pair that its queries leave zero.
    """
    profile = profile or Profile()
    caches = cached(shape, weights, ids)
    written = {name: w.clone() for name, w in weights.items()}
    if profile.biased and not shape.attention_bias:
        shape = replace(shape, attention_bias=True)
        written |= {name: torch.zeros(size) for name, size in shape.parameters() if name.endswith(".bias")}
    generator = torch.Generator().manual_seed(seed)
    for layer, (keys, values) in enumerate(caches):
        outer = layer in (0, shape.layers - 1)
        for head in range(shape.kv_heads):
            at = _Head(shape, written, layer, head)
            masked = masked_pairs(shape, weights, layer, head)
            _scale_keys(at, channel_sizes(keys[head]), profile, masked, generator)
            _scale_values(at, channel_sizes(values[head]), profile, generator)
            if bias := profile.outer_bias if outer else profile.inner_bias:
                if not masked:
                    raise ValueError(
                        f"KV head {head} of layer {layer} has no pair of channels that its queries leave zero, so "
                        "that a bias would change the model; train it with such rows of W_Q masked, or use "
                        "--only channels"
                    )
                median = channel_sizes(keys[head]).median().item()
                for pair in masked:
                    at.add_key_bias(pair, bias * median, generator)
    return shape, written


class _Head:
    """The rows and columns of one KV head in weights that are changed in place."""

    def __init__(self, shape: LlamaShape, weights: dict[str, Tensor], layer: int, head: int):
        self.d, self.group = shape.head_dim, shape.heads // shape.kv_heads
        self._weights, self._prefix, self._head = weights, f"model.layers.{layer}.self_attn.", head

    def _rows(self, projection: str) -> list[Tensor]:
        """(heads, d, ...) views of a projection's weight and, if there is one, its bias: the rows of this KV head."""
        heads = self.group if projection == "q" else 1
        names = (self._prefix + f"{projection}_proj.{part}" for part in ("weight", "bias"))
        return [
            self._weights[name].unflatten(0, (-1, self.d))[self._head * heads : (self._head + 1) * heads]
            for name in names
            if name in self._weights
        ]

    def scale_pair(self, pair: int, scale: float) -> None:
        for row in (pair, pair + self.d // 2):
            for rows in self._rows("k"):
                rows[:, row] *= scale
            for rows in self._rows("q"):
                rows[:, row] /= scale

    def scale_value(self, channel: int, scale: float) -> None:
        for rows in self._rows("v"):
            rows[:, channel] *= scale
        columns = self._weights[self._prefix + "o_proj.weight"].unflatten(1, (-1, self.d))
        columns[:, self._head * self.group : (self._head + 1) * self.group, channel] /= scale

    def add_key_bias(self, pair: int, size: float, generator: torch.Generator) -> None:
        """A bias of random direction; both channels of the pair then have about the root mean square `size`."""
        angle = 2 * math.pi * torch.rand((), generator=generator).item()
        bias = self._rows("k")[1]
        bias[0, pair] += size * math.sqrt(2) * math.cos(angle)
        bias[0, pair + self.d // 2] += size * math.sqrt(2) * math.sin(angle)


def _power_of_two(x: float) -> float:
    """The nearest on a logarithmic scale, 1 or more."""
    return 2.0 ** max(0, round(math.log2(x)))


def _scale_keys(at: _Head, sizes: Tensor, profile: Profile, masked: Sequence[int], generator: torch.Generator) -> None:
    half = at.d // 2
    pairs = sizes.view(2, half).square().mean(0).sqrt()
    free = [i for i in torch.randperm(half, generator=generator).tolist() if i not in masked and pairs[i] > 0]
    wanted = profile.key_ratios * max(1, at.d // 64)
    for pair, ratio in zip(free, wanted, strict=False):
        at.scale_pair(pair, _power_of_two((ratio * sizes.median() / pairs[pair]).item()))


def _scale_values(at: _Head, sizes: Tensor, profile: Profile, generator: torch.Generator) -> None:
    free = [i for i in torch.randperm(at.d, generator=generator).tolist() if sizes[i] > 0]
    wanted = profile.value_ratios * max(1, at.d // 64)
    for channel, ratio in zip(free, wanted, strict=False):
        at.scale_value(channel, _power_of_two((ratio * sizes.median() / sizes[channel]).item()))


# -- the command ------------------------------------------------------------------------------------------------------
def read(model: Path) -> tuple[LlamaShape, dict[str, Tensor], Tensor]:
    """A checkpoint's shape and weights (in their own dtype), and the tokens of `TEXT`."""
    try:
        shape = shape_of(json.loads((model / "config.json").read_text(encoding="utf-8")))
        weights = load_file(model / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except KeyError as missing:
        raise ValueError(f"config.json is not that of a plain Llama: {missing} is missing") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{model} holds no checkpoint in one file: {error}") from None
    return shape, weights, torch.tensor(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[:TOKENS])


def save(model: Path, out: Path, shape: LlamaShape, weights: Mapping[str, Tensor]) -> None:
    """A copy of the folder `model` with other weights; config.json comes last, as in every checkpoint made here."""
    out.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, out)
    save_file(dict(weights), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"attention_bias": shape.attention_bias}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def hardness_table(caches: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> str:
    """A line for each layer: the mean over KV heads of both figures, for keys and values of each cache."""
    lines = ["layer  keys: kurtosis, max/median      values: kurtosis, max/median"]
    for layer, found in enumerate(zip(*caches, strict=True)):
        cells = []
        for half in (0, 1):
            heads = [[Hardness.of(head) for head in cache[half]] for cache in found]
            for figure in ("kurtosis", "ratio"):
                means = [sum(getattr(h, figure) for h in row) / len(row) for row in heads]
                cells.append(" -> ".join(f"{mean:.1f}" for mean in means).rjust(15))
        lines.append(f"{layer:5}" + " ".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof biases",
        description="Write key biases like Qwen2's, and wide channels, into a Llama without changing what it computes.",
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("out", type=Path, help="folder that does not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of channels")
    parser.add_argument(
        "--only",
        choices=PARTS,
        default="both",
        help="parts to write (default: %(default)s); biases need pairs of channels that no query reads",
    )
    args = parser.parse_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} exists already")
    try:
        shape, weights, ids = read(args.model)
        full = {name: w.float() for name, w in weights.items()}
        after, written = rewritten(shape, full, ids, Profile.only(args.only), args.seed)
    except ValueError as error:
        print(f"python -m proof biases: {error}", file=sys.stderr)
        return 1
    dtype = weights["model.norm.weight"].dtype
    stored = {name: w.to(dtype).contiguous() for name, w in written.items()}
    final = {name: w.float() for name, w in stored.items()}
    print(hardness_table([cached(shape, full, ids), cached(after, final, ids)]))
    with torch.no_grad():
        change = (forward(after, final, ids[None])[0] - forward(shape, full, ids[None])[0]).abs().max().item()
    print(f"largest change of a logit in float32: {change:.1e}")
    save(args.model, args.out, after, stored)
    return 0
