"""All patches, in the order in which those of one moment are installed. Imports no vllm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_kvq.integration.patches import settings, uses
from vllm_kvq.integration.patches.patch import Hooks, Moment, Patch
from vllm_kvq.integration.patches.registered import (
    builtin_specs,
    census,
    connectors,
    dtypes,
    fingerprints,
    own_sources,
    page_sizes,
    platforms,
    variables,
    windows,
)
from vllm_kvq.integration.patches.served import adapters, loaded, orphans, seeds, shared_caches, states, warmup, zeroing
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PATCHES: tuple[Patch, ...] = (
    # when vLLM loads its plugins; formats have to be known before anything that follows looks at them
    own_sources.HIDDEN,
    dtypes.WIDENED,
    dtypes.REGISTERED,
    dtypes.HIDDEN,
    variables.VARIABLES_KNOWN,
    platforms.BACKENDS,
    platforms.CONFIGURATIONS,
    page_sizes.APART,
    windows.WINDOWS,
    windows.CHUNKS,
    builtin_specs.BUILTIN,
    connectors.BEHIND_HITS,
    fingerprints.SEEDED,
    census.CENSUS,
    # when a configuration is made
    orphans.ORPHANS,
    # when a packed layer's weights are loaded
    states.WITHOUT_CHECKPOINTS,
    shared_caches.FOUND,
    adapters.WITHOUT,
    loaded.ON_GPU,
    loaded.ON_CPU,
    # when a worker prepares its KV cache groups
    seeds.SEEDS,
    zeroing.ZEROED,
    warmup.WARMED_UP,
    states.STARTED,
    *settings.SETTINGS,
    *uses.USES,
)


def at(*moments: Moment) -> Iterator[Patch]:
    """Those of these moments that this vLLM needs."""
    return (patch for patch in PATCHES if patch.moment in moments and patch.of_this_vllm)


def register(hooks: Hooks) -> None:
    """Install what comes before any configuration. What only some servers need is left out where vLLM lacks its names;
    `problem` then refuses these servers."""
    for patch in at(Moment.REGISTERED):
        if patch.install is not None and (patch.only is None or patch.problem() is None):
            patch.install(hooks)


def install(moment: Moment, vllm_config: VllmConfig) -> None:
    """Install what this server needs at this moment."""
    for patch in at(moment):
        if patch.install is not None and patch.wanted(vllm_config):
            patch.install(vllm_config)


def registration_problem() -> Problem | None:
    """Why no server could run: the first name that is missing."""
    everybodys = (patch for patch in at(Moment.REGISTERED) if patch.only is None)
    return next(filter(None, (patch.problem() for patch in everybodys)), None)


def problem(vllm_config: VllmConfig, *moments: Moment) -> Problem | None:
    """Why this server can't run: the same for what it needs at these moments."""
    needed = (patch for patch in at(*moments) if patch.wanted(vllm_config))
    return next(filter(None, (patch.problem() for patch in needed)), None)
