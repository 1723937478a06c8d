"""A request with a seed draws the same numbers however its prompt is cut into chunks, on a CPU, too.

A chunk that does not end the prompt is sampled like any other step, and what was drawn is dropped. vLLM then sets the
request's generator back with two calls that only a GPU's generators have, which ends a CPU's engine for everybody.
Here the generators of such requests keep their state instead, and vLLM does not see them at that place.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def keep_seeds() -> None:
    """Mend the runner of this process, once; it serves our format."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_kvq_seeds" in CPUModelRunner.__dict__:
        return
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @functools.wraps(sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {i: generator.get_state() for i, generator in _unfinished(self).items()}
        output = sample(self, *args, **kwargs)
        for i, state in before.items():
            self.input_batch.generators[i].set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _unfinished(self)
        for i in hidden:
            del self.input_batch.generators[i]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = _sample, _bookkeeping_sync
    CPUModelRunner._kvq_seeds = True


def _unfinished(runner: Any) -> dict[int, Any]:
    """Place in the batch -> generator, of requests whose prompt goes on after this step."""
    batch = runner.input_batch
    rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    return {int(i): batch.generators[int(i)] for i in rows if int(i) in batch.generators}
