"""Layers that stay in vLLM's own 16-bit cache beside packed ones: layers with a sliding window, and `skip_layers`.

vLLM's pool has pages of one size. A 16-bit layer takes the largest block that fits into one of our pages and is padded
to it (vLLM's own mechanism for `kv_cache_dtype_skip_layers`); where our page is too small for the smallest block of
such a layer, our block grows. The memory of window layers does not grow with the context; that of skipped layers does.

Beside such layers prefix caching is off. A hit computes our window again, and for the first tokens of that window the
window layers would need keys from before it, which vLLM does not keep; skipped layers would write what they computed
from packed history into pages that other requests read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_kvq.integration.setup import settings_of

WINDOWS = "sliding_window"
"""All layers with a sliding window, in vLLM's list of layers to skip."""
SMALLEST_BLOCK = 32
"""The smallest block of vLLM's CPU attention."""


@dataclass(frozen=True)
class Layers:
    """The model's attention layers, by what keeps them out of our cache."""

    total: int
    windows: frozenset[int]
    """Indices of the layers that have a sliding window."""
    skipped: frozenset[int]
    """Indices of the layers with full attention that the user keeps in 16 bits."""
    kept: tuple[str, ...]
    """All that stays in 16 bits, in vLLM's words: indices and WINDOWS."""

    @classmethod
    def of(cls, vllm_config: Any) -> Layers:
        model = vllm_config.model_config
        windows = frozenset(i for i, kind in enumerate(layer_types(model)) if "sliding" in kind)
        kept = {str(i) for i in settings_of(vllm_config).skip_layers}
        kept |= {*vllm_config.cache_config.kv_cache_dtype_skip_layers} | ({WINDOWS} if windows else set())
        named = frozenset(int(i) for i in kept if i.isdigit())
        return cls(model.get_total_num_hidden_layers(), windows, named - windows, tuple(sorted(kept)))

    @property
    def packed(self) -> int:
        return self.total - len(self.windows) - len(self.skipped)

    @property
    def smallest_kind(self) -> int:
        """How many layers the smallest kind has: vLLM's KV cache groups are as large as that."""
        return min(n for n in (self.packed, len(self.windows), len(self.skipped)) if n > 0)

    def problem(self) -> str | None:
        """Why these layers can't be kept."""
        beyond = sorted(i for i in self.skipped if i >= self.total)
        if not beyond:
            return None
        return f"option 'skip_layers' names layer {beyond[0]}; the model has layers 0 to {self.total - 1}"


def layer_types(model: Any) -> list[str]:
    """The kind of each layer, for models that say it."""
    return getattr(model.hf_text_config, "layer_types", None) or []


def window_problem(model: Any) -> str | None:
    """What stands against serving this model's window layers beside packed ones; None: nothing."""
    kinds = layer_types(model)
    sliding = [kind for kind in kinds if "sliding" in kind]
    if model.get_sliding_window() is None and not sliding:
        return None
    if not sliding or len(sliding) == len(kinds):
        return "models in which all layers have sliding-window attention"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "sliding-window attention on this platform"
    return None


def fitting_block(page: int, token_bytes: int, divides: int | None = None) -> int:
    """The most tokens of a 16-bit layer that fit into one of our pages; with `divides`, a divisor of that number."""
    largest = page // token_bytes // SMALLEST_BLOCK * SMALLEST_BLOCK
    if divides is None:
        return largest
    return max(b for b in range(SMALLEST_BLOCK, largest + 1, SMALLEST_BLOCK) if divides % b == 0)
