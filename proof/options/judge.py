"""The properties that every combination must have; what one lacks comes back as sentences.

it is served by all paths that know it, with the reference's answers over its own pages (trace.py)
what it reads back is finite and has the shape of what was stored
where an option has more bits, the error is smaller
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from proof.kernels.exact import relative_error
from proof.options.case import Case
from proof.options.trace import HEADS, Trace
from vllm_kvq.bench.pools import calibrated, outlier_data, state_for
from vllm_kvq.formats import PageFormat
from vllm_kvq.formats.methods.qjl import SketchKeys
from vllm_kvq.kernels.paths import Wish, path_for

WISHES = {
    "PyTorch": Wish("cpu", "torch"),
    "C++": Wish("cpu"),
    "GPU": Wish("cpu", "torch", gpu_path=True),
}
"""The paths that a case may be judged on; one that does not know the case is left out."""
ANSWERS = {"PyTorch": 1e-5, "C++": 1e-3, "GPU": 2e-3}
SKETCHED = 2e-2
"""The same for QJL's keys, except in PyTorch: the other kernels round queries to 8 bits."""
OUTPUT = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The error of rounding an answer to the model's dtype."""
MOVED = 0.03
"""Share of a unit's elements that codes on a border, and their scales, may move."""
WORSE = 2e-3
"""By how much this may add to a unit's relative error."""
FEWER_AND_MORE: dict[str, tuple[Any, Any]] = {
    "key_bits": (2, 4),
    "value_bits": (2, 4),
    "angle_bits": (2, 4),
    "radius_bits": (2, 4),
    "m": (64, 1024),
    "boost": ("eighth", "half"),
    "key_rate": (1, 5),
    "searched_bits": (2, 4),
}
"""Options that buy precision: of two values the second has the smaller error."""


@dataclass
class Verdict:
    refused: str | None = None
    """The sentence with which the format, or a server, refuses the combination."""
    paths: list[str] = field(default_factory=list)
    """The paths that it was judged on."""
    findings: list[str] = field(default_factory=list)


def judge(case: Case, paths: tuple[str, ...] = tuple(WISHES)) -> Verdict:
    verdict = Verdict()
    try:
        fmt = calibrated(case.bind(), HEADS)
    except ValueError as error:
        verdict.refused = str(error)
        named = [f"option {name!r}" for name in case.options] + [f"not {case.head_size};"]
        if not any(words in verdict.refused for words in named) or "\n" in verdict.refused:
            verdict.findings.append(f"refused without naming one of its options, or its heads: {error}")
        return verdict
    if fmt.reference_only:
        verdict.refused = fmt.reference_only
        return verdict
    for name in paths:
        path = path_for(fmt, WISHES[name])
        if path.name.split("/")[0] != name:
            continue
        verdict.paths.append(name)
        # a GPU's kernels are interpreted: as few programs as possible
        trace = Trace(fmt, path, case.seed, *((1, 1) if name == "GPU" else ()))
        trace.run()
        verdict.findings += [f"{path.name}: {what}" for what in _lacks(trace, _tolerance(fmt, name))]
    verdict.findings += _errors_that_do_not_fall(case, fmt)
    return verdict


def _tolerance(fmt: PageFormat, path: str) -> float:
    sketched = isinstance(fmt.keys, SketchKeys) and path != "PyTorch"
    allowed = SKETCHED if sketched else ANSWERS[path]
    return allowed + OUTPUT[fmt.geometry.dtype]


def _lacks(trace: Trace, tolerance: float) -> Iterator[str]:
    if not trace.finite:
        yield "not everything is finite, or of the right shape"
    if not trace.answers <= tolerance:
        yield f"answers are off by {trace.answers:.1e}, {tolerance:.1e} is allowed"
    if not (trace.moved <= MOVED and trace.worse <= WORSE):
        yield f"{trace.moved:.1%} of the packed elements differ, and their error is larger by {trace.worse:.1e}"


def _errors_that_do_not_fall(case: Case, fmt: PageFormat) -> Iterator[str]:
    for name, (fewer, more) in FEWER_AND_MORE.items():
        if fmt.settings.get(name) is None and name not in {o.name for o in fmt.settings.keys.options}:
            continue
        try:
            both = [calibrated(case.bind(**{name: value}), HEADS) for value in (fewer, more)]
        except ValueError:  # not together with the other options
            continue
        errors = [_error(case, name, bound) for bound in both]
        if not errors[1] < errors[0]:
            yield f"{name}: the error is {errors[0]:.3f} with {fewer}, but {errors[1]:.3f} with {more}"


def _error(case: Case, option: str, fmt: PageFormat) -> float:
    """The error of scores, or of the values if the option belongs to them."""
    geometry = fmt.geometry
    key, value = outlier_data(2 * fmt.N, HEADS, geometry.head_size, case.seed)
    units = (2 * fmt.N // fmt.unit, fmt.unit)
    state = state_for(fmt, key, case.seed)
    state = None if state is None else state.repeat(units[0], 1, 1)
    wide = (fmt.widen(x.to(geometry.dtype))[0] for x in (key, value))
    k, v = (x.unflatten(1, units).transpose(0, 1).flatten(0, 1) for x in wide)
    position = torch.arange(0, 2 * fmt.N, fmt.unit).repeat_interleave(HEADS)
    k_hat, v_hat = fmt.unpack(fmt.pack(k, v, state, position=position))
    if option in {o.name for o in fmt.settings.values.options}:
        return relative_error(v_hat, v.double())
    queries = torch.randn(256, geometry.d, generator=torch.Generator().manual_seed(case.seed))
    return relative_error(queries @ k_hat.transpose(1, 2), (queries @ k.transpose(1, 2)).double())
