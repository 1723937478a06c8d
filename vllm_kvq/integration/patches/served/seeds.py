"""A request with a seed draws the same numbers however its prompt is cut into chunks, on a CPU, too.

A chunk that does not end the prompt is sampled like any other step, and what was drawn is dropped. vLLM then sets the
request's generator back with two calls that only a GPU's generators have, so a CPU's engine crashes for everybody.
Here the generators of such requests keep their state instead, and vLLM does not see them at that place.

It has nothing to do with compression. It is here because any client could stop a server with one seeded request whose
prompt is longer than a chunk; docs/upstream.md has a reproduction.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Moment, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
SAMPLE, BOOKKEEPING = f"{RUNNER}._sample", f"{RUNNER}._bookkeeping_sync"


def keep_seeds(_: VllmConfig) -> None:
    def make_sample(sample: Any) -> Any:
        @functools.wraps(sample)
        def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = {i: generator.get_state() for i, generator in _unfinished(self).items()}
            output = sample(self, *args, **kwargs)
            for i, state in before.items():
                self.input_batch.generators[i].set_state(state)
            return output

        return _sample

    def make_bookkeeping(bookkeeping: Any) -> Any:
        @functools.wraps(bookkeeping)
        def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = _unfinished(self)
            for i in hidden:
                del self.input_batch.generators[i]
            try:
                return bookkeeping(self, *args, **kwargs)
            finally:
                self.input_batch.generators.update(hidden)

        return _bookkeeping_sync

    once(SAMPLE, make_sample)
    once(BOOKKEEPING, make_bookkeeping)


def _unfinished(runner: Any) -> dict[int, Any]:
    """Place in the batch -> generator, of requests whose prompt goes on after this step."""
    batch = runner.input_batch
    rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    return {int(i): batch.generators[int(i)] for i in rows if int(i) in batch.generators}


SEEDS = Patch(
    what="CPUModelRunner._sample and _bookkeeping_sync wrapped",
    why="a seeded request whose prompt comes in chunks crashes the engine on a CPU",
    until="vLLM rewinds a CPU's generator",
    needs=(SAMPLE, BOOKKEEPING, f"{RUNNER}.discard_request_mask", f"{RUNNER}.input_batch"),
    moment=Moment.BUILT,
    install=keep_seeds,
    replaces=(SAMPLE, BOOKKEEPING),
    cpu_only=True,
)
