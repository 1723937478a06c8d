"""Values with constants, which `python -m proof transforms` compares with those of formats/methods/klt.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_kvq.eval.heads.capture import Layer
from vllm_kvq.formats.codec import Geometry, ValueCodec
from vllm_kvq.formats.constants import Moments, by_head, known
from vllm_kvq.formats.methods.klt import BITS, DIGIT, SearchedValues, Transform, constants_of
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.scales import scale_field, scale_of
from vllm_kvq.formats.parts.search import levels, searched
from vllm_kvq.formats.parts.turning import Turning


def fitted(same: Sequence[Layer]) -> torch.Tensor:
    """One layer's constants from its values in several texts: those of transformed keys that do not turn, and that all
    directions read alike."""
    value = torch.cat([layer.value for layer in same])
    heads, d = value.shape[1:]
    alike = torch.eye(d, dtype=torch.float64).expand(heads, -1, -1)
    moments = replace(Moments.of(value, value), reads=torch.ones(heads, dtype=torch.float64), queries=alike)
    return constants_of(moments, Turning.none(d), d)


class CentredValues(SearchedValues):
    """Less the mean of their KV head."""

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        super().__init__(geometry, options)
        self._constants = geometry.constants and geometry.constants.values

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return super().pack(x - self._mean(x), state)

    def unpack(self, fields: Packed) -> torch.Tensor:
        x = super().unpack(fields)
        return x + self._mean(x)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        mean = known(self._constants, self.name)[:, :1]
        return mean.expand_as(by_head(x, len(mean))).flatten(0, 1)


class TransformedValues(ValueCodec):
    """By a transform of their KV head, with more bits for channels of more variance, as keys are. Never served: each
    code takes a byte."""

    name = "transformed"
    title = "transformed, one scale per token"
    options = (BITS,)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self._d, self._slots = geometry.d, geometry.d * options[BITS.name] // DIGIT
        self._constants = geometry.constants and geometry.constants.values

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return Field("v_codes", torch.uint8, (SLAB, self._d)), scale_field("v_scale")

    @property
    def _transform(self) -> Transform:
        return Transform.of(known(self._constants, self.name), self._slots)

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        t = self._transform
        y = (by_head(x, len(t.constant)) - t.constant[:, None]) @ t.forward
        codes, scale = (x.flatten(0, 1) for x in searched(y, t.step, t.most, t.weight))
        return {
            "v_codes": codes.to(torch.uint8).unflatten(1, (-1, SLAB)),
            "v_scale": scale.squeeze(-1).unflatten(1, (-1, SLAB)),
        }

    def unpack(self, fields: Packed) -> torch.Tensor:
        t = self._transform
        codes, scale = (by_head(x.flatten(1, 2), len(t.constant)) for x in (fields["v_codes"], fields["v_scale"]))
        y = levels(codes.float(), t.step, t.most) * scale_of(scale).unsqueeze(-1)
        return (y @ t.backward + t.constant[:, None]).flatten(0, 1)
