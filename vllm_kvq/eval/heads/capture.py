"""Queries, keys and values of texts, layer by layer, as passed to the cache: after RoPE, in the model's dtype.

vLLM runs the texts with its own 16-bit cache, in its own process; hooks on its attention layers record them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_kvq.formats.codec import LARGEST_BLOCK
from vllm_kvq.formats.constants import Calibration, Constants
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.settings import Settings
from vllm_kvq.integration.preview.apart import apart

OfServer = Callable[[str, Mapping[str, Any]], Mapping[int, Constants]]
"""The constants that a server of this model has, by layer, with a format and its options. ValueError, with a sentence,
if it would not start."""


@dataclass(frozen=True)
class Layer:
    """One attention layer's tensors, (tokens, heads, head size): queries with all heads, others with KV heads."""

    index: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    """The factor of scores before softmax."""

    @property
    def head_size(self) -> int:
        return self.key.shape[-1]


@dataclass(frozen=True)
class Captured:
    layers: tuple[Layer, ...]
    """The layers that a low-bit cache would pack."""
    windows: tuple[int, ...]
    """Layers with a sliding window, which are not packed."""
    pairing: str | None
    """How RoPE pairs channels; None where the model has no RoPE, or several kinds."""
    rotary_dim: int | None
    rope: Rope | None
    """The RoPE applied to token t's queries and keys, at position t; None if there are several, or none."""
    total: int | None = None
    """The number of the model's layers, including those without attention; None: the last one here is the last."""
    calibration: Captured | None = None
    """The same for other texts, one after the other, to which formats that can't be served are fitted; None: there are
    none."""
    of_server: OfServer | None = None
    """Where calibrated formats that can be served get their constants from; None: there are none."""
    constants: dict[tuple[int, str, Settings], Constants | None] = field(default_factory=dict, init=False, repr=False)
    """What has been fitted to a calibration's layers, by layer and format: the same for every text that is measured."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("the model has no attention layer with its own keys and values to measure")

    def calibrated(self, page: PageFormat, layer: Layer, options: Mapping[str, Any]) -> PageFormat:
        """With the layer's constants: a server's, or if there can't be one, fitted to the other texts. `options` are
        those of all layers. Raises ValueError if the constants are not known."""
        if not (page.keys.reference_only or page.values.reference_only):
            if self.of_server is None:
                raise ValueError("the format takes its constants from a server, and none was asked")
            return page.with_constants(self.of_server(page.name, options)[layer.index])
        if self.calibration is None:
            raise ValueError("the format has constants that are fitted to another text, and no other text was captured")
        made, key = self.calibration.constants, (layer.index, page.name, page.settings)
        if key not in made:
            (found,) = (other for other in self.calibration.layers if other.index == layer.index)
            fitted = page.calibrated_on(Calibration(found.query, found.key, found.value))
            made[key] = fitted.geometry.constants
        return page.with_constants(made[key])

    @property
    def count(self) -> int:
        """The number of the model's layers."""
        return self.total or 1 + max(*(layer.index for layer in self.layers), *self.windows, -1)


def together(captured: Sequence[Captured]) -> Captured:
    """Texts one after the other; RoPE is the longest's."""
    longest = max(captured, key=lambda text: len(text.layers[0].key))
    layers = tuple(
        replace(same[0], **{name: torch.cat([getattr(x, name) for x in same]) for name in ("query", "key", "value")})
        for same in zip(*(text.layers for text in captured), strict=True)
    )
    return replace(longest, layers=layers)


def capture(model: str, texts: Sequence[Sequence[int]], dtype: str = "auto") -> Captured:
    """The texts one after the other. Raises Failed with the last sentence of vLLM's output."""
    found: Captured = apart(_captured, model, [list(text) for text in texts], dtype)
    return found


# -- in vLLM's process ------------------------------------------------------------------------------------------------
def _captured(model: str, texts: list[list[int]], dtype: str) -> Captured:
    from vllm import LLM, EngineArgs, SamplingParams

    from vllm_kvq.integration import compat
    from vllm_kvq.integration.worker.binding import table_of

    longest = max(map(len, texts))
    engine: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "kv_cache_dtype": "auto",
        "max_model_len": longest + 1,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    config = EngineArgs(**engine, kv_cache_memory_bytes=1).create_engine_config()
    llm = LLM(**engine, kv_cache_memory_bytes=_room(config.model_config, longest))
    seen = _Seen()
    llm.apply_model(seen.watch)
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    layers = seen.layers()
    styles = compat.rope_styles(layers[0].head_size) if layers else set()
    pairing, rotary = styles.pop() if len(styles) == 1 else (None, None)
    ropes = compat.ropes(layers[0].head_size) if layers else []
    rope = table_of(ropes[0]) if len(ropes) == 1 else None
    if rope is not None:
        rope = replace(rope, table=rope.table[:longest].cpu().clone())
    total = config.model_config.get_total_num_hidden_layers()
    return Captured(layers, tuple(seen.windows), pairing, rotary, rope, total)


def _room(model: Any, tokens: int) -> int:
    """Memory for these tokens, whatever the block size is; vLLM's default on a CPU is nine tenths of the machine."""
    heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    return 2 * layers * 2 * heads * model.get_head_size() * model.dtype.itemsize * (tokens + LARGEST_BLOCK)


class _Seen:
    """Hooks on a model, and what they have recorded."""

    def __init__(self) -> None:
        self.attention: dict[int, Any] = {}
        self.windows: list[int] = []
        self.passed: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def watch(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.utils import extract_layer_index

        for name, module in model.named_modules():
            if not isinstance(module, Attention):
                continue
            index = extract_layer_index(name)
            if module.sliding_window is not None:
                self.windows.append(index)
                continue
            self.attention[index] = module
            module.register_forward_pre_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            self.passed.setdefault(index, []).append(tuple(x.detach().cpu().clone() for x in arguments[:3]))

        return hook

    def layers(self) -> tuple[Layer, ...]:
        found = []
        for index, chunks in sorted(self.passed.items()):
            module = self.attention[index]
            size = module.head_size
            query, key, value = (torch.cat(parts).unflatten(-1, (-1, size)) for parts in zip(*chunks, strict=True))
            found.append(Layer(index, query, key, value, module.impl.scale))
        return tuple(found)
