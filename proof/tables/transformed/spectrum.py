"""What bits by channel are worth to transformed keys: `python -m proof spectrum MODEL --out DIR`.

Every KV head's keys are transformed as formats/methods/klt.py does it, with constants of the evaluation's calibration
texts, and stored twice at three bits per channel: with as many bits as the format gives each channel, and with three
for each. Other texts are measured. For each head the error is that of scores: of q . k over all queries and the keys
they may see, relative to how much q . k varies. The head in the middle, by what it gains, is also written channel by
channel.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from proof.tables.transformed.fitted import SINKS, fitted
from vllm_kvq import console
from vllm_kvq.eval.constants import calibration_texts
from vllm_kvq.eval.heads.capture import Layer
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.reading.reader import Reader
from vllm_kvq.eval.tasks.samples import texts
from vllm_kvq.formats.constants import grouped
from vllm_kvq.formats.methods.klt import DIGIT, Transform
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.scales import scale_of
from vllm_kvq.formats.parts.search import levels, searched, widths

PROG = "python -m proof spectrum"
BITS, CONTEXT = 3, 1024
CHANNELS, HEADS = "spectrum-channels.csv", "spectrum-heads.csv"


@dataclass(frozen=True)
class Head:
    """Relative errors of scores."""

    layer: int
    head: int
    equal: float
    """Three bits for every channel."""
    by_channel: float

    @property
    def gain(self) -> float:
        return self.equal / self.by_channel


@dataclass(frozen=True)
class Channel:
    """Shares of all channels' variance, from the largest."""

    variance: float
    bits: int
    equal: float
    """The squared error with three bits."""
    by_channel: float
    """The same with `bits`."""


@dataclass(frozen=True, eq=False)
class Errors:
    """Sums over one text's tokens, of each KV head: first with equal bits, then with bits by channel."""

    channels: torch.Tensor
    """(2, H, d): squared errors as queries see them."""
    scores: torch.Tensor
    """(2, H): squared errors of q . k."""
    spread: torch.Tensor
    """(H,): squares of q . k around its mean over keys."""

    @classmethod
    def of(cls, text: Layer, t: Transform) -> Errors:
        key = text.key[SINKS:].float().transpose(0, 1)
        query = grouped(text.query[SINKS:].float(), len(key))
        slab = torch.arange(SINKS, len(text.key)) // SLAB
        y = (key - t.turning.phases(slab) @ t.mean) @ t.forward
        channels, scores = [], []
        for step, most in (widths(torch.full(y.shape[-1:], BITS)), (t.step, t.most)):
            codes, byte = searched(y, step, most, t.weight)
            wrong = levels(codes, step, most) * scale_of(byte) - y
            channels.append((wrong.square() * t.weight).sum(1))
            scores.append(squares(query, wrong @ t.backward))
        return cls(torch.stack(channels), torch.stack(scores), squares(query, key - key.mean(1, keepdim=True)))

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(H,): of q . k, over all queries (H, tokens * group, d) and the keys (H, tokens, d) up to their own tokens."""
    n = key.shape[1]
    seen = torch.ones(n, n).tril().repeat_interleave(query.shape[1] // n, 0)
    return ((query @ key.mT).square() * seen).sum((-2, -1))


def measured(constants: torch.Tensor, texts: Sequence[Layer]) -> Iterator[tuple[Head, list[Channel]]]:
    """One layer's heads."""
    t = Transform.of(constants, constants.shape[-1] * BITS // DIGIT)
    first, *others = (Errors.of(text, t) for text in texts)
    found = sum(others, first)
    tokens = sum(len(text.key) - SINKS for text in texts)
    relative = (found.scores / found.spread).sqrt()
    for h, variance in enumerate(t.weight[:, 0]):
        whole = variance.sum()
        equal, by_channel = found.channels[:, h] / tokens / whole
        # a channel without bits has one level
        bits = (t.most[h, 0] + 1).log2()
        rows = torch.stack([variance / whole, bits, equal, by_channel], 1)[variance.argsort(descending=True)]
        channels = [Channel(v, round(b), e, c) for v, b, e, c in rows.tolist()]
        yield Head(texts[0].index, h, *relative[:, h].tolist()), channels


def middle(heads: Sequence[Head]) -> Head:
    """The one whose gain is the median, or the next larger."""
    return sorted(heads, key=lambda head: head.gain)[len(heads) // 2]


def write(path: Path, rows: Sequence[Head] | Sequence[Channel]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(rows[0]))
        writer.writerows([f"{x:.4g}" if isinstance(x, float) else x for x in astuple(row)] for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog=PROG, description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"folder for {HEADS} and {CHANNELS}")
    parser.add_argument("--sequences", type=int, default=8, help=f"texts of {CONTEXT} tokens (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.sequences < 1:
        parser.error("--sequences must be positive")
    try:
        model = Model.of(options.model, None)
        reader = Reader(model.folder, model.dtype)
    except ValueError as error:
        return console.fail(PROG, error, as_json=False)
    constants = fitted([reader.before(text).captured for text in calibration_texts(model.tokenizer, model.longest)])
    read = [
        reader.before(texts(model.tokenizer, 0).text(number, CONTEXT).tokens).captured.layers
        for number in range(options.sequences)
    ]
    found = {
        head: channels
        for same in zip(*read, strict=True)
        for head, channels in measured(constants[same[0].index], same)
    }
    shown, heads = middle([*found]), sorted(found, key=lambda head: head.gain)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / HEADS, [*found])
    write(options.out / CHANNELS, found[shown])
    print(f"{len(heads)} heads: equal bits have {heads[0].gain:.2f} to {heads[-1].gain:.2f} times the error of scores")
    print(f"the middle one is head {shown.head} of layer {shown.layer}: {shown.equal:.3f} and {shown.by_channel:.3f}")
    return 0
