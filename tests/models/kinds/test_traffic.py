"""Random engines and traffic of the fuzzer over models that mix kinds of layers, and the faults that it has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import mixed_faults
import pytest
from models_on_disk import Written
from one_each import KINDS

from proof.fuzz.attempt import Runner
from proof.fuzz.case import MODEL, Setup
from proof.fuzz.draw import WORDS, Drawer, draw_setup
from proof.models import SERVED
from proof.oracle.trace import Request, Trace
from proof.oracle.verdict import Verdict

pytestmark = pytest.mark.engine
Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def judged(written: Written) -> Judge:
    """judged(setup, traces, prepare) -> verdict."""
    model = written(**MODEL)

    def judge(setup: Setup, todo: list[Trace], prepare: Any = None) -> Verdict:
        runner = Runner(str(model), setup, prepare)
        try:
            return runner.judge(todo)
        finally:
            runner.close()

    return judge


def drawn(setup: Setup, seed: str) -> list[Trace]:
    drawer = Drawer(Random(seed), setup)
    return [drawer.trace(f"t{i}", reset=i == 0) for i in range(2)]


def growing(setup: Setup, seed: str) -> list[Trace]:
    """Requests that are admitted together and grow until the pool is empty, as the fuzzer draws them now and then."""
    rng = Random(seed)
    prompts = [tuple(rng.choice(WORDS) for _ in range(40 + 9 * i)) for i in range(6)]
    return [Trace(tuple(Request(f"r{i}", p, 110, arrival=i) for i, p in enumerate(prompts)), reset=True)]


def crowded(setup: Setup, seed: str) -> list[Trace]:
    """Prompts of several chunks that begin alike and come one after the other, so that the later ones hit; then short
    ones that grow together."""
    rng = Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(WORDS) for _ in range(count))

    prompt = words(140)
    alike = [Request(f"alike{i}", prompt + words(7 * i), 24, arrival=12 * i) for i in range(3)]
    grow = [Request(f"r{i}", words(20 + 7 * i), 70, arrival=50) for i in range(5)]
    return [Trace((*alike, *grow), reset=True)]


def squeezed(engine: Any) -> None:
    """While five requests run, the pool has no free block until one of them is preempted: how many requests a pool
    holds differs too much among kinds and formats to draw one in which that happens."""
    pool, schedule = engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.schedule
    taken: list[Any] = []

    def observed(*args: Any, **kwargs: Any) -> Any:
        if len(engine.scheduler.running) == 5:
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        out = schedule(*args, **kwargs)
        if len(engine.scheduler.running) < 5:  # one was preempted, or has finished
            pool.free_blocks(taken)
            taken.clear()
        return out

    engine.scheduler.schedule = observed


# layers that share a cache read it with the constants of the layer that has it
BY_DEFAULT = (("Llama 4", "squat2"), ("Granite 4", "lossless"), ("gpt-oss", "innerq2"), ("Gemma-3n", "klt3"))
WINDOWS = [a.name for a in SERVED if a.windows and not a.vision]
CASES = [
    *(
        (name, form)
        for name in (*WINDOWS, "Granite 4", "Nemotron-H", "Falcon-H1")
        for form in ("lossless", *KINDS, "kitty2")
    ),
    # hybrid models are refused
    *((name, "klt3") for name in WINDOWS),
]


@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*c, marks=() if c in BY_DEFAULT else pytest.mark.wide) for c in CASES]
)
def test_random_traffic(name: str, form: str, judged: Judge) -> None:
    rng = Random(f"{name}/{form}")
    setup = replace(draw_setup(rng, form, "V1", name), prefix_caching=True, far=False)
    total = judged(setup, drawn(setup, f"{name}/{form}/traces"))
    assert not total.mismatches
    assert total.tokens > 100
    assert total.ties <= 0.05 * total.tokens


def pages_of_32(engine: Any) -> None:
    assert {beside.block for beside in engine.beside.values()} == {32}


def test_windows_with_pages_of_their_own(judged: Judge) -> None:
    """Packed pages of 128 tokens, and pages of 32 in layers with a window."""
    setup = Setup("squat2", 128, {"W": 32, "S": 4}, "Gemma-3", pool=1.6, keep_all=True)
    total = judged(setup, drawn(setup, "pages of their own"), pages_of_32)
    assert not total.mismatches
    assert total.hits > 0


@pytest.mark.wide
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in CASES))
def test_hits_chunks_and_preemption(name: str, form: str, judged: Judge) -> None:
    """What a random draw may leave out, by the kernels that servers use."""
    # outlier channels' numbers are bytes, too small for 512 channels
    whole = {"outliers": 0} if (name, form) == ("Gemma-4", "qjl3") else {}
    setup = Setup(form, 32, {"W": 32, "S": 4, **whole}, name, pool=4.0, budget=64, keep_all=True, kernels="auto")
    todo = crowded(setup, f"{name}/{form}")
    total = judged(setup, todo, squeezed)
    assert not total.mismatches
    assert total.tokens == sum(r.max_tokens for r in todo[0].requests)
    assert min(total.hits, total.preemptions) > 0
    assert total.ties <= 0.05 * total.tokens


FAULTS: dict[str, tuple[Any, Any, Setup]] = {
    "a stale page of a window": (mixed_faults.stale_window, drawn, Setup("squat2", 32, {"W": 32}, "Gemma-3", pool=1.6)),
    "a stale page of 32 tokens": (
        mixed_faults.stale_window,
        drawn,
        Setup("squat2", 128, {"W": 32}, "Gemma-3", pool=1.6, keep_all=True),
    ),
    "a learned sink": (mixed_faults.dropped_sink, drawn, Setup("squat2", 32, {"W": 32}, "gpt-oss", pool=3.0)),
    "a state after preemption": (
        mixed_faults.kept_state,
        growing,
        Setup("squat2", 32, {"W": 0, "r": 10}, "Granite 4", pool=1.8, budget=64, keep_all=True),
    ),
}
"""What is planted, the traffic, and the engine that has to be distinguished from a healthy one."""


@pytest.mark.wide
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, judged: Judge) -> None:
    plant, traffic, setup = FAULTS[fault]
    todo = traffic(setup, fault)
    healthy = judged(setup, todo)
    assert not healthy.mismatches
    assert healthy.preemptions > 0 if traffic is growing else healthy.hits > 0
    assert judged(setup, todo, plant).mismatches
