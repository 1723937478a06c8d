"""Where a KV connector keeps pages elsewhere, their hashes begin with the fingerprint of what pages mean.

vLLM's block hashes name tokens and nothing else, and the connectors that are allowed make their keys from them. Two
servers with different options would find each other's pages in a store that they share. All hashes of an engine follow
from a seed, so they have nothing in common if the seeds differ. Without a connector nothing leaves an engine, and
hashes stay vLLM's own.

That does not reach connectors that make other keys: ExampleConnector and LMCache hash the tokens themselves. Nor does
it reach handshakes: NIXL's compares versions, the model and the cache's dtype, and only the peers of vLLM's offloading
tiers compare the seed. All of these are refused (plan/connectors.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import CONNECTORS, Hooks, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "kvq_fingerprint"
"""Where a connector's extra configuration has the fingerprint (plan/connectors.py)."""
MARKED = "kvq_marked"
"""Set there if the server, and not its user, has written the fingerprint."""
SEED = "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler.__init__"


class _Engine:
    """The one that is being made in this process: its scheduler comes first, then the seed."""

    fingerprint: str | None = None


def seed_hashes(hooks: Hooks) -> None:
    def make_scheduler(own: Callable[..., None]) -> Any:
        @functools.wraps(own)
        def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
            transfer = vllm_config.kv_transfer_config
            _Engine.fingerprint = None if transfer is None else transfer.kv_connector_extra_config.get(KEY)
            own(self, vllm_config, *args, **kwargs)

        return init

    def make_seed(own: Callable[[Any], str]) -> Any:
        @functools.wraps(own)
        def resolve_none_hash_seed(hash_fn: Any) -> str:
            seed = own(hash_fn)
            return seed if _Engine.fingerprint is None else f"{seed} kvq {_Engine.fingerprint}"

        return resolve_none_hash_seed

    once(SCHEDULER, make_scheduler)
    once(SEED, make_seed)


SEEDED = Patch(
    what="resolve_none_hash_seed and Scheduler.__init__ wrapped",
    why="block hashes, and so the keys of the KV connectors that are allowed, say nothing of what a page means",
    until="a platform or a backend may add to the hashes of its blocks",
    needs=(SEED, SCHEDULER),
    install=seed_hashes,
    replaces=(SEED, SCHEDULER),
    only=CONNECTORS,
)
