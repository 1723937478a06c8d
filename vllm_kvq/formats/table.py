"""The one table of formats. Command line, docs, tests, kernels and the integration look everything up here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.fields import round_up
from vllm_kvq.formats.innerq import HybridKeys, HybridValues
from vllm_kvq.formats.lossless import RawKeys
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.polar import PaperPolarKeys, PolarKeys
from vllm_kvq.formats.qjl import SketchKeys
from vllm_kvq.formats.settings import Settings
from vllm_kvq.formats.squat import ChannelKeys, SQuatKeys
from vllm_kvq.formats.values import RawValues, TokenValues

DEFAULT_N = 64


def _squat(geo: Geometry, s: Settings) -> KeyCodec:
    # two blocks at d = 128, never one (that is plain KIVI)
    block = s.g or min(64, geo.d // 2)
    if block >= geo.d:
        raise ValueError(
            f"option 'g' is {block}, the whole head of {geo.d} channels: that is KIVI; use kivi2 or a smaller g"
        )
    return SQuatKeys(geo, s.key_bits, s.r, s.lam, block)


def _qjl(geo: Geometry, s: Settings) -> KeyCodec:
    sizes = s.m or 2 * geo.d, s.m_out or round_up(geo.d, 32), s.outliers or geo.d // 16
    return SketchKeys(geo, *sizes, s.seed, s.outlier_choice)


def _polar(geo: Geometry, s: Settings) -> KeyCodec:
    codec = PolarKeys if s.mode == "grouped" else PaperPolarKeys
    return codec(geo, s.angle_bits, s.radius_bits)


KEYS: dict[str, Callable[[Geometry, Settings], KeyCodec]] = {
    "squat": _squat,
    "kivi": lambda geo, s: ChannelKeys(geo, s.key_bits),
    "qjl": _qjl,
    "polar": _polar,
    "innerq": lambda geo, s: HybridKeys(geo, s.key_bits),
    "lossless": lambda geo, s: RawKeys(geo),
}
VALUES: dict[str, Callable[[Geometry, Settings], ValueCodec]] = {
    "token": lambda geo, s: TokenValues(geo, s.value_bits, s.group),
    "innerq": lambda geo, s: HybridValues(geo, s.value_bits),
    "raw": lambda geo, s: RawValues(geo),
}


@dataclass(frozen=True)
class Format:
    """One entry of the table: the name that users type, and its default settings."""

    name: str
    title: str
    defaults: Settings
    public: bool = True

    def settings(self, options: Mapping[str, Any] | None = None) -> Settings:
        return self.defaults.with_options(self.name, options or {})

    def bind(self, geometry: Geometry, options: Mapping[str, Any] | None = None) -> PageFormat:
        s = self.settings(options)
        return PageFormat(self.name, geometry, s, KEYS[s.keys](geometry, s), VALUES[s.values](geometry, s))

    def bits_per_element(self, head_size: int, block_size: int = DEFAULT_N, **options: Any) -> float:
        """Bits per cached element, keys and values averaged, counted from the byte layout with all overhead."""
        return self.bind(Geometry(head_size, block_size), options).bits_per_element

    def capacity_factor(self, head_size: int, block_size: int = DEFAULT_N, **options: Any) -> float:
        """How many times more tokens than 16-bit pages the packed pages hold (sidecars and sinks not counted)."""
        return 16 / self.bits_per_element(head_size, block_size, **options)


def _table(*formats: Format) -> dict[str, Format]:
    return {f.name: f for f in formats}


FORMATS: dict[str, Format] = _table(
    Format("squat2", "SQuat, 2-bit keys", Settings("squat", "token", W=32)),
    Format("squat4", "SQuat, 4-bit keys", Settings("squat", "token", key_bits=4, value_bits=4, W=32)),
    Format("qjl3", "QJL, sign sketches", Settings("qjl", "token", W=128)),
    Format("polar4", "PolarQuant m4n4", Settings("polar", "token", value_bits=4, group=128, W=128)),
    Format("polar3", "PolarQuant m4n2", Settings("polar", "token", radius_bits=2, W=128)),
    Format("innerq2", "InnerQ, hybrid", Settings("innerq", "innerq", S=32, W=96)),
    Format("kivi2", "KIVI, 2-bit", Settings("kivi", "token", W=32)),
    Format("kivi4", "KIVI, 4-bit", Settings("kivi", "token", key_bits=4, value_bits=4, W=32)),
    Format("lossless", "bit-exact, for tests", Settings("lossless", "raw"), public=False),
)


def get_format(name: str) -> Format:
    if name not in FORMATS:
        known = ", ".join(f.name for f in FORMATS.values() if f.public)
        raise ValueError(f"unknown KV cache format {name!r}; known formats are {known}")
    return FORMATS[name]
