"""Random engines and traces. Lengths at boundaries are drawn more often than others."""

from __future__ import annotations

import string
from dataclasses import replace
from itertools import pairwise
from random import Random

from proof.fuzz.case import MAX_LEN, Setup
from proof.fuzz.kinds import LLAMA, kind
from proof.models.copies import COPIES
from proof.models.seeing import SEEING
from proof.oracle.adapters import ADAPTERS
from proof.oracle.reference.kinds import exact_layers
from proof.oracle.reference.replay import sharing_layers
from proof.oracle.trace import Picture, Request, Trace
from vllm_kvq.formats import get_format

WORDS = range(10, 500)
WORDS_OF_COPIES = range(300, 40_000)
BLOCK_SIZES = (32, 64, 64, 96, 128)
ROOM_FOR_A_DRAFT = 512
"""Tokens of a packed block that is as large as 32 float32 tokens of the draft's cache, vLLM's smallest block."""
LARGEST_WITH_OUTLIERS = 256
"""Channels of a head that a byte names, as QJL does those of outliers."""
WINDOWS = (0, 32, 64, 96)
MANY = 64
"""Requests that run at a time."""
MOST = 80
"""Requests of a trace."""
PICTURES = (1, 2)
SINKS = (0, 4, 20, 32, 33)
LONGEST_ANSWER = 130
LONGEST = MAX_LEN - LONGEST_ANSWER - 10
"""Tokens of a prompt."""


def draw_setup(rng: Random, format_name: str, runner: str | None = None, model: str = LLAMA) -> Setup:
    """`runner`: the requested one; None: mostly V1, whose steps take a thirtieth of the time."""
    arch = kind(model)
    block = rng.choice(BLOCK_SIZES)
    options = {}
    # half of the time the format's own window and sinks
    if format_name == "lossless" or rng.random() < 0.5:
        options = {"W": rng.choice(WINDOWS), "S": min(block, rng.choice(SINKS))}
    elif block < get_format(format_name).settings().S:
        block = 64
    if format_name == "qjl3" and arch.head_size > LARGEST_WITH_OUTLIERS:
        options["outliers"] = 0
    runner = runner or ("V2" if rng.random() < 0.1 else "V1")
    drafts, draft_model = rng.choice((0, 0, 1, 2, 3, 4, 5)), rng.random() < 0.25 and model == LLAMA
    if arch.hybrid or (arch.adapter and runner == "V2"):
        drafts = 0
    if drafts and draft_model and format_name != "lossless":
        block = ROOM_FOR_A_DRAFT
    setup = Setup(
        format_name,
        block,
        options,
        model,
        pool=rng.choice((1.1, 1.3, 1.6, 2.0, 3.0, None)),
        budget=rng.choice((24, 40, 64, 100, 256, 2048)),
        max_seqs=rng.choice((3, 8, 16, 16, MANY if runner == "V1" else 16)),  # V2's steps are slow
        drafts=drafts,
        lookup_min=rng.choice((1, 1, 2)),
        draft_model=bool(drafts) and draft_model,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        prefix_caching=rng.random() < 0.85,
        keep_all=rng.random() < 0.5,
        # the C++ kernels are what is served; PyTorch's are float32 throughout, which leaves fewer ties
        kernels=rng.choice(("auto", "auto", "torch")),
        # there would be millions of small blocks, each an object of vLLM's
        far=rng.random() < 0.2 and block >= 64,
        runner=runner,
        asynchronous=runner == "V2" and rng.random() < 0.5,
    )
    full = _full_layers(setup)
    if len(full) > 1 and rng.random() < 0.15:
        setup = replace(setup, options={**options, "skip_layers": [rng.choice(full)]})
    return setup


def _full_layers(setup: Setup) -> list[int]:
    """Indices of the layers with full attention and a cache of their own; for hybrids none is drawn."""
    if setup.arch.hybrid:
        return []
    config = setup.arch.text()
    return sorted({*range(config.num_hidden_layers)} - {*exact_layers(config)} - {*sharing_layers(config)})


class Drawer:
    """Traces for one engine. They share documents, so that later ones hit what earlier ones left in the cache."""

    def __init__(self, rng: Random, setup: Setup) -> None:
        self.rng, self.setup, self.growing = rng, setup, False
        # prompts are shorter than a block with room for a draft; then boundaries of slabs are drawn
        self.page = setup.block_size if setup.block_size < ROOM_FOR_A_DRAFT else 64
        self.words = WORDS_OF_COPIES if setup.model in COPIES else WORDS
        # longer than window and page together, else nothing is hit
        self.documents = [self._words(rng.randint(280, LONGEST)) for _ in range(3)]

    def trace(self, name: str, reset: bool) -> Trace:
        rng, arrival, requests = self.rng, 0, []
        # requests that are admitted together and then grow by pages until the pool is empty: some are preempted
        self.growing = rng.random() < 0.3
        most = MOST if self.setup.max_seqs == MANY else 24
        for i in range(rng.choice((4, 8, 12, 16, most))):
            requests.append(self._request(f"{name}r{i}", arrival))
            # bursts, steady arrivals, and now and then a pause after which the engine is idle
            arrival += rng.choice((0, 0, 0, 0, 1, 1, 2, 4, 150 if rng.random() < 0.1 else 0))
        return Trace(tuple(requests), reset)

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choice(self.words) for _ in range(count))

    def _length(self) -> int:
        """Around page and slab boundaries, or anywhere up to three and a half pages."""
        rng, n = self.rng, self.page
        if rng.random() < 0.4:
            return max(1, rng.choice((1, 32, 64, n, 2 * n, 3 * n)) + rng.choice((-1, 0, 1)))
        return rng.randint(1, rng.choice((n, int(3.5 * n))))

    def _prompt(self) -> tuple[int, ...]:
        rng, n = self.rng, self.page
        kind = rng.random()
        if kind < 0.45:
            document = rng.choice(self.documents)
            cut = rng.choice((self._length(), n * rng.randint(1, len(document) // n), len(document)))
            tail = rng.choice((0, 0, 1, rng.randint(1, 40)))
            return document[:cut] + self._words(tail)
        if kind < 0.65:
            # it repeats itself, so that ngram speculation finds drafts
            phrase = self._words(rng.randint(1, 12))
            return self._words(rng.randint(0, 40)) + phrase * rng.randint(3, 12)
        return self._words(self._length())

    def _shown(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """With up to two pictures, often those of other prompts in the same places."""
        rng, seeing = self.rng, SEEING[self.setup.model]
        count = rng.choice((0, 1, 1, 2))
        prompt = prompt[: LONGEST - count * seeing.tokens]
        # pictures have words between them
        cuts = sorted({min(len(prompt), rng.choice((0, 3, 40, self.page, 150))) for _ in range(count)})
        ends = [*cuts, len(prompt)]
        parts: list[int | tuple[int, ...]] = [prompt[: ends[0]]]
        for cut, end in pairwise(ends):
            parts += [rng.choice(PICTURES), prompt[cut:end]]
        return seeing.prompt(parts)

    def _request(self, name: str, arrival: int) -> Request:
        rng = self.rng
        prompt = self._prompt()[:LONGEST]
        pictures: tuple[Picture, ...] = ()
        tokens = rng.choice((1, 2, 4, 8, 12, 16, 20, 24, 32, 40))
        if self.growing:
            prompt, tokens = prompt[: self.page + 40], rng.randint(60, LONGEST_ANSWER)
        if self.setup.model in SEEING:
            prompt, pictures = self._shown(prompt)
        # vLLM's CPU sampler puts wrong tokens in the place of rejected drafts as soon as one request of a batch samples
        # (with n > 1 a request samples, if only among tokens that are equally good, which the reference can tell)
        several = rng.random() < 0.06 and not self.setup.drafts and self.setup.arch.replay
        stops = rng.random()
        return Request(
            name,
            prompt,
            tokens,
            arrival,
            n=rng.randint(2, 3) if several else 1,
            temperature=0.01 if several else 0.0,
            abort_after=rng.randint(1, tokens) if rng.random() < 0.08 else None,
            priority=rng.randint(0, 3) if self.setup.policy == "priority" else 0,
            stop=tuple(rng.sample(string.ascii_lowercase, 2)) if stops < 0.08 else (),
            pictures=pictures,
            adapter=rng.randint(0, ADAPTERS) if self.setup.arch.adapter else 0,
            # models with images are not asked for structured output
            letters="".join(rng.sample(string.ascii_lowercase, 5))
            if rng.random() < 0.1 and self.setup.model not in SEEING
            else "",
            stop_token_ids=tuple(rng.sample(self.words, 20)) if stops > 0.94 else (),
        )
