"""Names the formats that the CPU attends slowly, in one sentence with what to use instead.

The library itself reports for which halves of a format, keys and values, it has integer kernels
(csrc/cpu/attend/integer/choose.h); float32 kernels serve the rest. The cause is found by asking the library again,
about the same format without an option, so the sentence can't differ from what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvq.formats import PageFormat, get_format
from vllm_kvq.formats.codec import HEAD_SIZES, Codec
from vllm_kvq.formats.methods.qjl import SketchKeys
from vllm_kvq.kernels.blame import chosen_codecs
from vllm_kvq.kernels.cpu.layout import bind
from vllm_kvq.kernels.cpu.library import ISAS, isa, library

HALVES = ("keys", "values")


@dataclass(frozen=True)
class Reason:
    halves: tuple[str, ...]
    because: str
    options: tuple[str, ...] = ()
    """The options to leave out; if there are none, only another cache is faster."""


def integer_halves(fmt: PageFormat) -> tuple[str, ...]:
    """The halves of a format that integer kernels attend with the instruction set in use."""
    bound, lib = bind(fmt), library()
    if bound is None or lib is None:
        raise ValueError(f"{fmt.name} has no C++ kernels here")
    found = int(lib.integer_halves(bound, isa()))
    return tuple(half for i, half in enumerate(HALVES) if found >> i & 1)


def slow(fmt: PageFormat) -> str | None:
    """The sentence about a format that C++ serves; None if fast kernels serve all of it."""
    reasons = _reasons(fmt)
    if not reasons:
        return None
    blamed = " and ".join(f"its {' and '.join(reason.halves)} {reason.because}" for reason in reasons)
    options = dict.fromkeys(option for reason in reasons for option in reason.options)
    instead = ["leave out " + " and ".join(f"'{option}'" for option in options)] if options else []
    if not all(reason.options for reason in reasons):
        instead.append("--kv-cache-dtype auto may be faster")
    return f"{fmt.name} is attended slowly here: the fast kernels don't serve {blamed}; {'; '.join(instead)}"


def _reasons(fmt: PageFormat) -> list[Reason]:
    fast = integer_halves(fmt)
    if not fast and ISAS[isa()] == "portable":
        return [Reason(HALVES, "on a processor without AVX2, or with VLLM_KVQ_ISA=portable")]
    found = {half: _reason(fmt, half) for half in HALVES if half not in fast}
    reasons = [reason for reason in found.values() if reason is not None]
    if heads := tuple(half for half, reason in found.items() if reason is None):
        served = sorted(set.intersection(*({*_head_sizes(fmt, half)} for half in heads)))
        sizes = f"{', '.join(map(str, served[:-1]))} and {served[-1]}"
        reasons.insert(0, Reason(heads, f"at head size {fmt.geometry.head_size} (they do at {sizes})"))
    if "keys" in fast and isinstance(fmt.keys, SketchKeys) and fmt.settings.get("outlier_choice") == "slab":
        # The kernel serves this, too, but prepares its query again whenever the outlier channels change.
        reasons.append(Reason(("keys",), "with outlier_choice=slab", ("outlier_choice",)))
    return reasons


def _reason(fmt: PageFormat, half: str) -> Reason | None:
    """The options, or the codec, that keep integer kernels from attending this half; None: the head size."""
    settings, chosen = fmt.settings, chosen_codecs(fmt)
    codec: type[Codec] = settings.keys if half == "keys" else settings.values
    default = get_format(fmt.name).settings(chosen)
    changed = tuple(o.name for o in codec.options if settings.get(o.name) != default.get(o.name))
    kept = {name: value for name, value in settings.own if name not in changed and value is not None}
    for names in (*((name,) for name in changed), changed):
        others = {name: settings.get(name) for name in changed if name not in names}
        if _fast(fmt, half, chosen | kept | others):
            because = ", ".join(f"{name}={settings.get(name)}" for name in names)
            return Reason((half,), f"with {because}", names)
    of_codec = f"of the codec '{codec.name}'"
    if half in chosen and _fast(fmt, half, {other: name for other, name in chosen.items() if other != half}):
        return Reason((half,), of_codec, (half,))
    if _head_sizes(fmt, half):
        return None
    return Reason((half,), of_codec if half in chosen else f"as {fmt.name} stores them")


def _fast(fmt: PageFormat, half: str, options: Mapping[str, Any], head_size: int | None = None) -> bool:
    """Whether integer kernels would attend this half with these options, and the defaults for the rest."""
    geometry = fmt.geometry
    if head_size:
        geometry = replace(geometry, head_size=head_size, rotary_dim=None, rope=None, constants=None)
    try:
        other = get_format(fmt.name).bind(geometry, options)
    except ValueError:  # head sizes that this format does not store
        return False
    return bind(other) is not None and half in integer_halves(other)


def _head_sizes(fmt: PageFormat, half: str) -> list[int]:
    """Head sizes that integer kernels attend with default options; if there are none, with the format's own codecs."""
    for codecs in (chosen_codecs(fmt), {}):
        if found := [d for d in HEAD_SIZES if _fast(fmt, half, codecs, d)]:
            return found
    return []
