"""Which format the name of a budget means on this server: the first that it can serve with fast kernels.

Where none has fast kernels, as on a path that is only for tests, it is the first that can be served at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.budgets import BUDGETS, Budget
from vllm_kvq.formats.settings import COMMON
from vllm_kvq.integration.plan.options import CALIBRATION, under_kvq
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.plan.refusals import check
from vllm_kvq.problem import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Chosen:
    budget: str
    format: str
    passed_over: Mapping[str, str]
    """The more precise formats, and why each is not served here: a sentence."""

    def __str__(self) -> str:
        reasons = {name: said.removeprefix(f"--kv-cache-dtype {name}: ") for name, said in self.passed_over.items()}
        why = "; ".join(f"not {name}: {said}" for name, said in reasons.items())
        return f"{self.budget} is {self.format} here" + (f" ({why})" if why else "")


def budget_of(vllm_config: VllmConfig) -> Budget | None:
    """The budget that the user names in place of a format."""
    return None if vllm_config.model_config is None else BUDGETS.get(vllm_config.cache_config.cache_dtype)


def choose(vllm_config: VllmConfig, budget: Budget) -> Chosen:
    """Raises Refused, with what the last format says, where none can be served."""
    refused: dict[str, str] = {}
    slow: dict[str, str] = {}
    given = under_kvq(vllm_config)
    names = {*map(str, given)} if isinstance(given, Mapping) else set()
    for name in _that_read(names, budget):
        with _as(vllm_config, name):
            try:
                check(vllm_config)
            except Refused as error:
                refused[name] = str(error)
                continue
            path = plan(vllm_config).path
        if not (problem := path.why or path.slow):
            return Chosen(budget.name, name, refused | slow)
        slow[name] = problem
    if not slow:
        name, sentence = refused.popitem()
        asked = f"--kv-cache-dtype {name}"
        raise Refused(sentence.replace(asked, f"--kv-cache-dtype {budget.name} ({name})", sentence.startswith(asked)))
    first = next(iter(slow))
    before = budget.formats[: budget.formats.index(first)]
    return Chosen(budget.name, first, {name: refused[name] for name in before if name in refused})


def _that_read(given: set[str], budget: Budget) -> list[str]:
    """The formats with such options: only what all formats have may be given, or a file of constants."""
    if own := sorted(given - {option.name for option in COMMON} - {CALIBRATION}):
        raise Refused(
            f"kvq option {own[0]!r} belongs to a format, and {budget.name} may be {' or '.join(budget.formats)}; "
            f"name the format, as in --kv-cache-dtype {budget.formats[0]}"
        )
    return [name for name in budget.formats if CALIBRATION not in given or FORMATS[name].settings().calibrated]


@contextmanager
def _as(vllm_config: VllmConfig, name: str) -> Iterator[None]:
    """With this format's name in the place of the one that is there."""
    cache = vllm_config.cache_config
    there = cache.cache_dtype
    cache.cache_dtype = name
    try:
        yield
    finally:
        cache.cache_dtype = there
