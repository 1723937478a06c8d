"""Makes a failing case small: fewer requests, plainer requests, shorter prompts and answers, a plainer engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from proof.fuzz.case import Case
from proof.fuzz.kinds import LLAMA
from proof.oracle.trace import Request, Trace

Fails = Callable[[Case], bool]
At = tuple[int, int]
"""(trace, request in it)."""

_PLAINER_REQUEST: tuple[dict[str, Any], ...] = (
    {"abort_after": None},
    {"stop": ()},
    {"stop_token_ids": ()},
    {"n": 1, "temperature": 0.0},
    {"priority": 0},
    {"adapter": 0},
    {"letters": ""},
    {"arrival": 0},
)
_PLAINER_SETUP: tuple[dict[str, Any], ...] = (
    {"pool": None, "policy": "fcfs", "budget": 2048, "max_seqs": 16, "prefix_caching": True},
    {"model": LLAMA, "options": {}},
    {"drafts": 0, "draft_model": False},
    {"draft_model": False},
    {"keep_all": False},
    {"far": False},
    {"pool": None},
    {"budget": 2048},
    {"prefix_caching": False},
    {"policy": "fcfs", "max_seqs": 16, "prefix_caching": True},
    {"options": {}},
    {"kernels": "torch"},
    {"runner": "V1", "asynchronous": False},
    {"asynchronous": False},
)


class Shrinker:
    """Delta debugging: a change is kept when the smaller case still fails."""

    def __init__(self, case: Case, fails: Fails, done: Callable[[], bool]) -> None:
        self.case, self.fails, self.done = case, fails, done
        self.path = [case]
        """Every case that was kept, the smallest last."""
        self.tried = 0

    def run(self) -> Case:
        before = None
        while before != self.case and not self.done():
            before = self.case
            self._drop_requests()
            for at in self._places():
                self._plainer_request(at)
            # each needs its own engine, so there are few
            for change in _PLAINER_SETUP:
                with suppress(ValueError):  # not what the requests need
                    self._try(replace(self.case, setup=replace(self.case.setup, **change)))
        return self.case

    def _try(self, candidate: Case) -> bool:
        if self.done() or not candidate.traces or candidate == self.case:
            return False
        self.tried += 1
        if not self.fails(candidate):
            return False
        self.case = candidate
        self.path.append(candidate)
        return True

    def _places(self) -> list[At]:
        return [(i, j) for i, trace in enumerate(self.case.traces) for j in range(len(trace.requests))]

    def _drop_requests(self) -> None:
        """ddmin over all requests; a trace without requests is left out."""
        size = max(1, len(self._places()) // 2)
        while not self.done():
            places, dropped = self._places(), False
            for first in range(0, len(places), size):
                gone = set(places[first : first + size])
                if len(gone) < len(places) and self._try(_without(self.case, gone)):
                    dropped = True
                    break  # the places have moved
            if dropped:
                size = max(1, min(size, len(self._places()) // 2))
            elif size == 1:
                return
            else:
                size //= 2

    def _plainer_request(self, at: At) -> None:
        for change in _PLAINER_REQUEST:
            self._change(at, replace(_get(self.case, at), **change))
        self._change(at, _without_pictures(_get(self.case, at)))
        request = _get(self.case, at)
        self._lower(1, request.max_tokens, lambda x: self._change(at, replace(_get(self.case, at), max_tokens=x)))
        self._lower(0, request.arrival, lambda x: self._change(at, replace(_get(self.case, at), arrival=x)))
        self._shorten(at)

    def _lower(self, low: int, high: int, change: Callable[[int], bool]) -> None:
        """Bisect, although failures need not be monotonic."""
        while low < high and not self.done():
            middle = (low + high) // 2
            if change(middle):
                high = middle
            else:
                low = middle + 1

    def _shorten(self, at: At) -> None:
        """Cut pieces out of a prompt of words, large ones first."""
        if _get(self.case, at).pictures:
            return
        size = len(_get(self.case, at).prompt) // 2
        while size >= 4 and not self.done():
            for first in range(0, len(_get(self.case, at).prompt), size):
                prompt = _get(self.case, at).prompt
                cut = prompt[:first] + prompt[first + size :]
                if cut and self._change(at, replace(_get(self.case, at), prompt=cut)):
                    break
            else:
                size //= 2

    def _change(self, at: At, request: Request) -> bool:
        return self._try(_with(self.case, at, request))


def last_good(path: Sequence[Case], fails: Fails) -> Case:
    """Roughly the last case on the path that `fails`, by bisection; the first one is known to fail."""
    if fails(path[-1]):
        return path[-1]
    low, high = 0, len(path) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if fails(path[middle]):
            low = middle
        else:
            high = middle - 1
    return path[low]


def _get(case: Case, at: At) -> Request:
    return case.traces[at[0]].requests[at[1]]


def _without_pictures(request: Request) -> Request:
    shown = {i for p in request.pictures for i in range(p.at, p.at + p.tokens)}
    prompt = tuple(token for i, token in enumerate(request.prompt) if i not in shown)
    return replace(request, prompt=prompt, pictures=()) if prompt else request


def _with(case: Case, at: At, request: Request) -> Case:
    traces = list(case.traces)
    requests = list(traces[at[0]].requests)
    requests[at[1]] = request
    traces[at[0]] = replace(traces[at[0]], requests=tuple(requests))
    return case.with_traces(tuple(traces))


def _without(case: Case, gone: set[At]) -> Case:
    traces = []
    for i, trace in enumerate(case.traces):
        kept = tuple(r for j, r in enumerate(trace.requests) if (i, j) not in gone)
        if kept:
            traces.append(Trace(kept, trace.reset))
    return case.with_traces(tuple(traces))
