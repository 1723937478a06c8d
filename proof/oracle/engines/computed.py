"""The work of a step: the scheduler's chunks, with what only vLLM's V2 model runner knows.

That runner keeps drafts where it makes them, and tells the scheduler their number. With asynchronous scheduling a step
is scheduled before the last one's tokens are known: the scheduler counts all its drafts as accepted.
"""

from __future__ import annotations

from typing import Any

from proof.oracle.trace import Chunk


class Computed:
    def __init__(self, engine: Any) -> None:
        # separate processes have runners that can't be seen from here, and these are V1's
        driver = getattr(engine.engine_core.engine_core.model_executor, "driver_worker", None)
        self.states = getattr(driver and driver.worker.model_runner, "req_states", None)

    def chunks(self, out: Any) -> list[Chunk]:
        """The chunks in the scheduler's output, without their pages."""
        cached, drafts = out.scheduled_cached_reqs, out.scheduled_spec_decode_tokens
        context = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
        context |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        admitted = {r.req_id for r in out.scheduled_new_reqs} | cached.resumed_req_ids
        chunks = [
            Chunk(i, context[i], n, list(drafts.get(i, [])), admitted=i in admitted)
            for i, n in out.num_scheduled_tokens.items()
        ]
        if self.states is not None:
            for chunk in chunks:
                if not chunk.admitted:
                    self._as_v2_knows_it(chunk, self.states)
        return chunks

    def _as_v2_knows_it(self, chunk: Chunk, states: Any) -> None:
        row = states.req_id_to_index[chunk.request]
        chunk.context = int(states.num_computed_tokens.gpu[row])
        chunk.drafts = states.draft_tokens[row, : len(chunk.drafts)].tolist()
