"""From the scheduler's chunks to *lives*: what a request computed between one admission and its end or preemption.

A life has tokens, positions and what it found in the prefix cache, each page and state by the life that wrote it;
blocks are used only here, as names by which a hit finds its page. Two replays read lives: `replay.Replay` step by
step, and `whole.Whole` all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proof.oracle.trace import Beside, Chunk, Request, Result, Trace
from vllm_kvq.formats import PageFormat


@dataclass(frozen=True)
class Part:
    """One chunk: its tokens, of which the last `drafts` are guesses."""

    context: int
    tokens: tuple[int, ...]
    drafts: int

    @property
    def end(self) -> int:
        return self.context + len(self.tokens)

    @property
    def known(self) -> int:
        """Up to here the tokens are the request's own."""
        return self.end - self.drafts


@dataclass(frozen=True)
class Found:
    """The pages of a hit in one layer: who wrote each, and as which of its own; None where vLLM no longer keeps it."""

    block: int
    """Tokens of a page."""
    pages: Sequence[tuple[Life, int] | None]

    def tokens(self) -> list[tuple[Life, int]]:
        """Each token of the pages that are there: who computed it, and its position."""
        there = [(page[0], i) for i, page in enumerate(self.pages) if page is not None]
        return [(writer, t) for writer, i in there for t in range(i * self.block, (i + 1) * self.block)]


@dataclass(eq=False)
class Life:
    name: str
    """Request and sample, for messages."""
    request: Request
    tokens: list[int]
    """The prompt and all that was answered."""
    start: int
    """Tokens that were there on admission: those of a hit."""
    hit: list[tuple[Life, int]]
    """(writer, page index) of each page of the hit."""
    known: int
    """Tokens known on admission: the prompt, after a preemption also what was answered before. None of these is chosen
    in this life, although a chunk may end between them."""
    parts: list[Part] = field(default_factory=list)
    published: int = 0
    """Tokens whose complete pages other lives may hit, its own and those of its hit."""
    windows: dict[int, Found] = field(default_factory=dict)
    """Layer with a window -> what it found there."""
    states: dict[int, Life] = field(default_factory=dict)
    """Layer with a state -> who left the one after `start` tokens."""

    def hit_in(self, layer: int, n: int) -> Found:
        """The hit in a layer that stays in vLLM's own cache; in all but windows its pages are the packed ones'
        companions, of `n` tokens."""
        return self.windows.get(layer) or Found(n, self.hit)

    @property
    def writers(self) -> set[Life]:
        """All lives whose pages and states this one begins with."""
        pages = [self.hit, *(found.pages for found in self.windows.values())]
        return {page[0] for found in pages for page in found if page is not None} | {*self.states.values()}


@dataclass
class History:
    """The lives of all traces of one engine, in the order of their admission."""

    lives: list[Life] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hits: int = 0
    hit_tokens: int = 0
    rejected: int = 0
    accepted: int = 0


class _Sample:
    """One sample of one request: its tokens, the names of its pages, its present life."""

    def __init__(self, name: str, request: Request, output: Sequence[int]) -> None:
        self.name, self.request, self.tokens = name, request, [*request.prompt, *output]
        self.life: Life | None = None
        self.known = len(request.prompt)
        self._keys: dict[int, list[int]] = {}

    def keys(self, n: int) -> list[int]:
        """One key for each page of n tokens: it stands for all tokens up to the page's end."""
        if n not in self._keys:
            found = self._keys[n] = []
            for i in range(len(self.tokens) // n):
                # equal tokens may stand for different pictures, and an adapter makes different keys and values of them
                shown = tuple(p for p in self.request.pictures if p.at < (i + 1) * n)
                found.append(
                    hash((found[-1] if i else self.request.adapter, tuple(self.tokens[i * n : (i + 1) * n]), shown))
                )
        return self._keys[n]


Name = tuple[int, int, int]
"""The name of a page or state in the prefix cache: its group (-1: the packed layers'), its block, the tokens up to its
end with the request's adapter and what pictures among them show."""


class Historian:
    """Keeps the prefix cache between the traces of one engine: who wrote each block, by the tokens up to its end."""

    def __init__(self, fmt: PageFormat) -> None:
        self.fmt = fmt
        self.history = History()
        self.pages: dict[Name, tuple[Life, int]] = {}

    def add(self, trace: Trace, result: Result) -> None:
        if trace.reset:
            self.pages.clear()
        samples = _samples(trace, result)
        for step in result.steps:
            waiting = list(step)
            while waiting:
                # a request may hit a page that another one completes in this very step
                ready = [c for c in waiting if self._found(samples[_sample_of(samples, c)], c, result.beside)]
                if not ready:
                    self.history.problems.append(f"{waiting[0].request}: hit a page that was never written")
                    return
                for chunk in ready:
                    self._chunk(samples[_sample_of(samples, chunk)], chunk, result.beside)
                    waiting.remove(chunk)

    def _hit(self, s: _Sample, c: Chunk) -> list[Name]:
        keys = s.keys(self.fmt.N)
        return [(-1, c.pages[i], keys[i]) for i in range(c.context // self.fmt.N)]

    def _hits_beside(self, s: _Sample, c: Chunk, beside: Sequence[Beside]) -> list[list[Name | None]]:
        """The blocks in each group of `beside`; if that keeps states, only the last block."""
        found = []
        for group, (blocks, kind) in enumerate(zip(c.beside, beside, strict=True)):
            pages, keys = c.context // kind.block, s.keys(kind.block)
            first = max(0, pages - 1) if kind.state else 0
            found.append([(group, blocks[i], keys[i]) if blocks[i] else None for i in range(first, pages)])
        return found

    def _found(self, s: _Sample, c: Chunk, beside: Sequence[Beside]) -> bool:
        if not _admitted(s, c):
            return True
        apart = self._hits_beside(s, c, beside)
        states = [name for found, kind in zip(apart, beside, strict=True) for name in found if kind.state]
        names = [*self._hit(s, c), *(name for found in apart for name in found if name is not None)]
        return all(name in self.pages for name in names) and None not in states

    def _chunk(self, s: _Sample, c: Chunk, beside: Sequence[Beside]) -> None:
        n, history = self.fmt.N, self.history
        if _admitted(s, c):
            names = self._hit(s, c)
            hit = [self.pages[k] for k in names]
            s.life = Life(s.name, s.request, s.tokens, c.context, hit, s.known, published=c.context)
            for found, kind in zip(self._hits_beside(s, c, beside), beside, strict=True):
                pages = [name and self.pages[name] for name in found]
                for layer in kind.layers:
                    if not kind.state:
                        s.life.windows[layer] = Found(kind.block, pages)
                    elif pages and pages[0]:
                        s.life.states[layer] = pages[0][0]
            history.lives.append(s.life)
            history.hits += bool(names)
            history.hit_tokens += len(names) * n
        life = s.life
        assert life is not None
        if life.parts:
            last = life.parts[-1]
            if not last.known <= c.context <= last.end:
                history.problems.append(f"{s.name}: {c.context} tokens are computed after {last.known} to {last.end}")
                return
            history.accepted += c.context - last.known
            history.rejected += last.end - c.context
        known = s.tokens[c.context : c.context + c.tokens - len(c.drafts)]
        if len(known) < c.tokens - len(c.drafts):
            return  # scheduled before an abort: no part of it is in the answer
        part = Part(c.context, (*known, *c.drafts), len(c.drafts))
        life.parts.append(part)
        if part.known >= s.known:
            s.known = part.known + 1
            for draft in c.drafts:
                if s.tokens[s.known - 1 : s.known] != [draft]:
                    break
                s.known += 1
        # what vLLM caches in this step: drafts are cached once they are accepted
        for i in range(life.published // n, part.known // n):
            self.pages[-1, c.pages[i], s.keys(n)[i]] = life, i
        for group, (blocks, kind) in enumerate(zip(c.beside, beside, strict=True)):
            done, keys = part.known // kind.block, s.keys(kind.block)
            # a state belongs to the end of a page only if a chunk ends there
            first = done - (part.known % kind.block == 0) if kind.state else 0
            # without prefix caching a request has one block for its states
            for i in range(max(first, life.published // kind.block), min(done, len(blocks))):
                self.pages[group, blocks[i], keys[i]] = life, i
        life.published = max(life.published, part.known)


def _admitted(s: _Sample, c: Chunk) -> bool:
    """Whether this chunk begins the request, for the first time or after a preemption."""
    return c.admitted or s.life is None


def _samples(trace: Trace, result: Result) -> dict[str, _Sample]:
    """By the names that vLLM gives them, up to a suffix: sample i of n is `i_R`, a single one `R`."""
    samples = {}
    for r in trace.requests:
        for i, output in enumerate(result.outputs[r.name]):
            samples[r.name if r.n == 1 else f"{i}_{r.name}"] = _Sample(f"{r.name}[{i}]", r, output)
    return samples


def _sample_of(samples: dict[str, _Sample], c: Chunk) -> str:
    name = c.request.rsplit("-", 1)[0]
    return name if name in samples else c.request
