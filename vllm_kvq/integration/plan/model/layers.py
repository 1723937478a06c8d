"""Layers that are not packed and stay in vLLM's own 16-bit cache: layers with a sliding window or with chunked local
attention, and `skip_layers`.

Each kind of layers has pages of its own size and KV cache groups of its own. The pages of a group's layers lie side by
side in a block of vLLM's pool, whose blocks are as large as the widest group (layout.py). The memory of window layers
does not grow with the context; that of skipped layers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvq.integration.plan.options import Options
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

WINDOWS = "sliding_window"
"""All layers with a sliding window, in vLLM's list of layers to skip."""


@dataclass(frozen=True)
class Layers:
    """The model's attention layers, by what keeps them out of our cache."""

    total: int
    """With those of a hybrid that have no attention."""
    attention: frozenset[int]
    """Indices of the layers that have any."""
    sharing: frozenset[int]
    """Indices of the layers that have no cache of their own, but share an earlier layer's (sharing.py). In what follows
    they count for nothing."""
    windows: frozenset[int]
    """Indices of the layers with a sliding window, or with chunks, which vLLM plans as windows
    (patches/registered/windows.py)."""
    skipped: frozenset[int]
    """Indices of the layers with full attention that the user keeps in 16 bits."""
    kept: tuple[str, ...]
    """All that stays in 16 bits, in vLLM's words: indices and WINDOWS."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, options: Options) -> Layers:
        """ValueError where the user names layers that the model does not have."""
        model = vllm_config.model_config
        kinds, total = layer_types(model), model.get_total_num_hidden_layers()
        sliding = frozenset(i for i, kind in enumerate(kinds) if "sliding" in kind)
        chunks = frozenset(i for i, kind in enumerate(kinds) if "chunked" in kind)
        sharing = sharing_layers(model)
        attention = frozenset(i for i in range(total) if not model.is_hybrid or has_attention(kinds[i]))
        kept = {str(i) for i in options.settings.skipped(total)}
        kept |= {*vllm_config.cache_config.kv_cache_dtype_skip_layers} | ({WINDOWS} if sliding else set())
        kept |= {str(i) for i in chunks}
        named, local = frozenset(int(i) for i in kept if i.isdigit()), sliding | chunks
        skipped = named - local
        if (own := attention - local - sharing) and max(own) in named:
            # layers with full attention share the last such cache, and vLLM asks each of them for its dtype
            kept |= {str(i) for i in sharing - local}
            skipped -= sharing
        return cls(total, attention, sharing, local - sharing, skipped, tuple(sorted(kept)))

    @property
    def packed_layers(self) -> tuple[int, ...]:
        """Indices of those that are packed."""
        return tuple(sorted(self.attention - self.windows - self.skipped - self.sharing))

    @property
    def packed(self) -> int:
        return len(self.packed_layers)

    def check(self) -> None:
        """ValueError where these layers can't be skipped."""
        named = "option 'skip_layers' names layer"
        if beyond := sorted(i for i in self.skipped if i >= self.total):
            # the option's own have been checked where they were resolved
            flag = "--kv-cache-dtype-skip-layers"
            raise ValueError(f"{flag} names layer {beyond[0]}; the model has layers 0 to {self.total - 1}")
        if without := sorted(self.skipped - self.attention):
            raise ValueError(f"{named} {without[0]}, which has no attention")
        if shared := sorted(self.skipped & self.sharing):
            raise ValueError(f"{named} {shared[0]}, which shares an earlier layer's KV cache")


def has_attention(kind: str) -> bool:
    """`hybrid`: Falcon-H1 has attention and a Mamba-2 state in every layer."""
    return kind in ("attention", "full_attention", "hybrid")


def sharing_layers(model: ModelConfig) -> frozenset[int]:
    """Indices of the layers that share an earlier layer's KV cache: the last ones."""
    total = model.get_total_num_hidden_layers()
    return frozenset(range(total - (getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0), total))


def layer_types(model: ModelConfig) -> list[str]:
    """The kind of each layer, for models that name it."""
    text = model.hf_text_config
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []


def window_problem(model: ModelConfig) -> Problem | None:
    """Why this model's window layers can't be served next to packed ones."""
    kinds, chunks = layer_types(model), model.attention_chunk_size
    local = [kind for kind in kinds if "sliding" in kind or "chunked" in kind]
    if model.get_sliding_window() is None and chunks is None and not local:
        return None
    if not local or len(local) == len(kinds):
        what = "sliding-window" if chunks is None else "chunked local"
        return Problem(f"models in which all layers have {what} attention", "use --kv-cache-dtype auto or fp8")
    return None


def chunk_problem(chunk: int | None, sizes: Sequence[int], block: int) -> Problem | None:
    """vLLM attends to a chunk as to a request of its own, whose block table begins with a page: no page of these
    `sizes` may lie in two chunks."""
    if chunk is None or sizes:
        return None
    return Problem(
        f"the model attends in chunks of {chunk} tokens, which no page size within blocks of {block} divides",
        "choose another --block-size",
    )
