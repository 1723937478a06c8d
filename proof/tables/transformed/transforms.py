"""What was tried for transform coding: `python -m proof transforms MODEL`.

Each row changes one thing of formats/methods/klt.py; its keys are measured with exact values, unless it says otherwise.
Texts are read as in `vllm-kvq eval --regimes reading`: the last tokens read the earlier ones' pages.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from proof.tables.transformed import values
from proof.tables.transformed.fitted import fitted, own_means
from proof.tables.transformed.scales import FLOAT16
from proof.tables.transformed.values import CentredValues, TransformedValues
from vllm_kvq import console
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.constants import calibration_texts
from vllm_kvq.eval.heads.capture import Captured
from vllm_kvq.eval.model import Model
from vllm_kvq.eval.reading.caches import cache_of
from vllm_kvq.eval.reading.reader import Past, Reader
from vllm_kvq.eval.run.reading import compared
from vllm_kvq.eval.tasks.samples import texts
from vllm_kvq.eval.tasks.texts import can_chat
from vllm_kvq.formats import table
from vllm_kvq.formats.codec import ValueCodec
from vllm_kvq.formats.constants import Constants
from vllm_kvq.formats.methods import klt
from vllm_kvq.formats.methods.klt import allocated

PROG = "python -m proof transforms"
CONTEXT, READERS = 1024, 128
TOGETHER = 16
Calibrate = Callable[[Sequence[Captured]], Sequence[Captured]]
"""Chooses from the nine texts of an evaluation."""


def in_sixteens(variance: Sequence[float], slots: int) -> list[int]:
    """Channels of similar variance get the same digits, sixteen at a time."""
    order = sorted(range(len(variance)), key=lambda c: variance[c])
    groups = [order[i : i + TOGETHER] for i in range(0, len(order), TOGETHER)]
    found = allocated([sum(variance[c] for c in group) for group in groups], slots // TOGETHER)
    digits = [0] * len(variance)
    for group, count in zip(groups, found, strict=True):
        for c in group:
            digits[c] = count
    return digits


def alike(variance: Sequence[float], slots: int) -> list[int]:
    """As equal as the slots allow."""
    most = sorted(range(len(variance)), key=lambda c: -variance[c])[: slots % len(variance)]
    return [slots // len(variance) + (c in most) for c in range(len(variance))]


def first(count: int) -> Calibrate:
    return lambda captured: captured[:count]


def documentation(captured: Sequence[Captured]) -> Sequence[Captured]:
    """One text in three of a model that can chat."""
    return captured[::3]


def all_of_them(captured: Sequence[Captured]) -> Sequence[Captured]:
    return captured


@dataclass(frozen=True)
class Row:
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Names of formats/methods/klt.py."""
    calibrate: Calibrate = all_of_them
    name: str = "klt3"
    keys_only: bool = True
    own_means: bool = False
    """Whether the mean of keys is that of the text that is measured."""
    values: type[ValueCodec] | None = None
    """With constants of their own; None: the format's."""

    @property
    def choice(self) -> Choice:
        return Choice(self.name, {**self.options, **({"values": "raw"} if self.keys_only else {})})

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.changed:
                stack.enter_context(patch.multiple(klt, **self.changed))
            if self.values is not None:
                changed = replace(table.get_format(self.name), values=self.values)
                stack.enter_context(patch.dict(table._built_in(), {self.name: changed}))
            yield

    def constants(self, texts: Sequence[Captured]) -> Mapping[int, Constants]:
        """By layer, fitted while what the row changes is in place."""
        texts = self.calibrate(texts)
        with self.planted():
            of_keys = fitted(texts)
        layers = zip(*(text.layers for text in texts), strict=True)
        of_values = {} if self.values is None else {same[0].index: values.fitted(same) for same in layers}
        return {layer: Constants(keys, of_values.get(layer)) for layer, keys in of_keys.items()}


HALF = {"key_rate": 2.5}
ROWS = (
    Row("kitty2's keys", name="kitty2"),
    Row("kitty2", name="kitty2", keys_only=False),
    *(Row(f"keys of {rate:g} bits", {"key_rate": rate}) for rate in (2, 2.5, 3, 4)),
    Row("2.5 bits, sixteen channels alike", HALF, {"allocated": in_sixteens}),
    Row("2.5 bits, all channels alike", HALF, {"allocated": alike}),
    Row("2.5 bits, without a look at queries", HALF, {"REGULAR": 1e3}),
    *(Row(f"2.5 bits, regular share {share:g}", HALF, {"REGULAR": share}) for share in (0.01, 0.2)),
    Row("2.5 bits, fitted to documentation only", HALF, calibrate=documentation),
    Row("2.5 bits, fitted to three texts", HALF, calibrate=first(3)),
    Row("2.5 bits, fitted to one text", HALF, calibrate=first(1)),
    *(Row(f"{rate:g} bits, means of the text itself", {"key_rate": rate}, own_means=True) for rate in (2.5, 3)),
    *(Row(f"klt{bits}", name=f"klt{bits}", keys_only=False) for bits in (2, 3, 4)),
    *(Row(f"klt3, values of {bits} bits", {"searched_bits": bits}, keys_only=False) for bits in (2, 4)),
    *(
        Row(f"klt{bits}, scales of two bytes", changed=FLOAT16, name=f"klt{bits}", keys_only=False)
        for bits in (2, 3, 4)
    ),
    *(
        Row(f"klt{bits}, values {what}", name=f"klt{bits}", keys_only=False, values=codec)
        for what, codec in (("less their mean", CentredValues), ("by a transform of their own", TransformedValues))
        for bits in (2, 3, 4)
    ),
)


@dataclass(frozen=True)
class Read:
    past: Past
    tokens: tuple[int, ...]
    exact: torch.Tensor


def prepared(reader: Reader, tokenizer: Any, number: int) -> Read:
    tokens = texts(tokenizer, 0).text(number, CONTEXT).tokens
    begin = CONTEXT - 1 - READERS
    past = reader.before(tokens[:begin])
    exact = reader.logits(past, tokens[begin:-1], None)
    return Read(past, tokens[begin:], exact.log_softmax(-1))


def loss(reader: Reader, read: Read, row: Row, constants: Mapping[int, Constants]) -> float:
    captured = read.past.captured
    found = own_means(constants, captured) if row.own_means else constants
    past = replace(read.past, captured=replace(captured, of_server=lambda name, options: found))
    with row.planted():
        logits = reader.logits(past, read.tokens[:-1], cache_of(row.choice, past))
    return float(compared(read.exact, logits.log_softmax(-1), read.tokens[1:])["kl"].mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog=PROG, description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder")
    parser.add_argument("--sequences", type=int, default=8, help=f"texts of {CONTEXT} tokens (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.sequences < 1:
        parser.error("--sequences must be positive")
    try:
        model = Model.of(options.model, None)
        if not can_chat(model.tokenizer):
            raise ValueError(
                f"{options.model} has no chat template, so its calibration has other texts; take another model"
            )
        reader = Reader(model.folder, model.dtype)
    except ValueError as error:
        return console.fail(PROG, error, as_json=False)
    captured = [reader.before(text).captured for text in calibration_texts(model.tokenizer, model.longest)]
    reads = [prepared(reader, model.tokenizer, number) for number in range(options.sequences)]
    print("| what | KL | geometric mean |\n| --- | --- | --- |")
    for row in ROWS:
        constants = row.constants(captured)
        found = [loss(reader, read, row, constants) for read in reads]
        middle = math.exp(sum(map(math.log, found)) / len(found))
        print(f"| {row.about} | {console.short(sum(found) / len(found))} | {console.short(middle)} |", flush=True)
    return 0
