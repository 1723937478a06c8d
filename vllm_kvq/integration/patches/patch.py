"""A patch is an object: what is changed in vLLM, why, until when, which private names it needs, when and how.

An upgrade of vLLM that renames one of these names is noticed at start-up, and said in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.patches.names import SUPPORTED, UNAVAILABLE, lacks, missing, release
from vllm_kvq.integration.patches.once import is_loaded, is_replaced
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.core.sched.scheduler import Scheduler


class Moment(Enum):
    """When a patch is installed, and what its `install` is called with."""

    REGISTERED = "when vLLM loads its plugins"
    """In every process of vLLM's, before it parses anything. `install` gets the Hooks: no configuration exists yet."""
    CONFIGURED = "when a configuration is made"
    """In the process that the user starts and in API servers, once a configuration is known to be served by one of our
    formats. `install` gets the VllmConfig."""
    LOADED = "when a packed layer's weights are loaded"
    """In every worker, before vLLM asks layers for their cache specs. `install` gets the VllmConfig, once per layer."""
    BUILT = "when a worker prepares its KV cache groups"
    """In every worker, when vLLM makes the metadata builder of a group of packed layers; the groups are known, and no
    step has run. `install` gets the VllmConfig."""


class Kind(Enum):
    PATCH = "patch"
    """A function of vLLM's is replaced or wrapped, or a state of vLLM's is changed: by `install`."""
    SETTING = "setting"
    """A value is written into vLLM's configuration or into its layers, in the module that `where` names."""
    USE = "use"
    """A private class is derived from, or a private name is read or called, in the module that `where` names."""


@dataclass(frozen=True)
class Hooks:
    """What patches call in the rest of the integration, which stands above them."""

    configure: Callable[[VllmConfig], None]
    """Sees every VllmConfig after the platform."""
    backend_of: Callable[[AttentionSelectorConfig], str | None]
    """The backend of a layer, by vLLM's AttentionSelectorConfig; None: the platform's own choice."""
    serves: Callable[[VllmConfig], bool]
    """Whether a format of ours serves a VllmConfig."""
    window_block: Callable[[VllmConfig], int | None]
    """Tokens of a page in layers with a window or chunks, by VllmConfig; None: no format of ours."""
    after_step: Callable[[Scheduler], None]
    """Sees a scheduler after each step."""
    behind_hit: Callable[[bool], None]
    """Told whether a KV connector asks about tokens after a hit."""
    environment_problem: Callable[[], Problem | None]
    """Why no server could start in this environment, before its arguments are read."""


@dataclass(frozen=True)
class Only:
    """The servers that need a patch."""

    who: str
    """Completes "its KV cache formats do not serve ..."."""
    needs: Callable[[VllmConfig], bool]
    """Whether the server with this VllmConfig does."""


HYBRIDS = Only("hybrid models", lambda config: config.model_config.is_hybrid)
SHARING = Only(
    "models whose layers share KV caches",
    lambda config: bool(getattr(config.model_config.hf_text_config, "num_kv_shared_layers", None)),
)
ADAPTERS = Only("requests with LoRA adapters", lambda config: config.lora_config is not None)
V2_RUNNER = Only("vLLM's V2 model runner", lambda config: config.use_v2_model_runner)
CONNECTORS = Only(
    "KV connectors",
    lambda config: config.kv_transfer_config is not None or bool(config.cache_config.kv_offloading_size),
)


@dataclass(frozen=True)
class Patch:
    """Something that is changed in vLLM, or a private part of it that is used."""

    what: str
    why: str
    until: str
    """What would make it unnecessary, or the first version of vLLM that does not need it."""
    needs: tuple[str, ...] = ()
    """Private names of vLLM's (names.py) that this patch, and nothing outside of its file, uses."""
    moment: Moment | None = Moment.REGISTERED
    """None: no server does this, only `vllm-kvq check`."""
    install: Callable[[Any], None] | None = None
    """Safe to call again."""
    versions: tuple[str, ...] = SUPPORTED
    replaces: tuple[str, ...] = ()
    """The functions that `install` replaces (once.py)."""
    active: Callable[[], bool] | None = None
    """Whether it is in effect, where it replaces no function."""
    only: Only | None = None
    """None: every server needs it."""
    cpu_only: bool = False
    kind: Kind = Kind.PATCH
    where: str = ""
    """The file in vllm_kvq/integration that does it, where no `install` does."""

    def __post_init__(self) -> None:
        if not (self.what and self.why and self.until and self.versions and {*self.versions} <= {*SUPPORTED}):
            raise ValueError(f"the patch {self.what!r} lacks a reason, an end or a supported version")
        if (self.install is None) == (not self.where):
            raise ValueError(f"the patch {self.what!r} names both or neither of `install` and `where`")
        if bool(self.replaces) + (self.active is not None) != (self.install is not None):
            raise ValueError(f"the patch {self.what!r} has no one way to say whether it is in effect")
        if (self.kind is Kind.PATCH) != (self.install is not None):
            raise ValueError(f"{self.what!r} is a {self.kind.value}, and `install` says otherwise")

    @property
    def place(self) -> str:
        """The file in vllm_kvq/integration that does it, `where` or `install`'s."""
        if self.install is None:
            return self.where
        return f"patches/{self.install.__module__.partition('.patches.')[2].replace('.', '/')}.py"

    @property
    def of_this_vllm(self) -> bool:
        return release() in self.versions

    def wanted(self, vllm_config: VllmConfig) -> bool:
        """Whether this server needs it."""
        if not self.of_this_vllm or (self.cpu_only and vllm_config.device_config.device_type != "cpu"):
            return False
        return self.only is None or self.only.needs(vllm_config)

    def problem(self) -> Problem | None:
        """The first name that this vLLM lacks."""
        what = missing((*self.needs, *filter(is_loaded, self.replaces)))
        if what is None:
            return None
        consequence = UNAVAILABLE if self.only is None else f"its KV cache formats do not serve {self.only.who}"
        purpose = "" if self.kind is Kind.USE else f"the {self.kind.value} "
        return lacks(what, f' for {purpose}"{self.what}"', consequence)

    def in_effect(self) -> bool:
        """Whether it is installed in this process, and nobody has undone it."""
        if self.active is not None:
            return self.active()
        loaded = [*filter(is_loaded, self.replaces)]
        return bool(loaded) and all(map(is_replaced, loaded))
