"""Step-by-step replay: the same model, in Transformers, over our reference cache.

The replay runs the scheduler's chunks over the engine's own tokens, so that each step is judged by itself:
`Replay.step` returns the logits that the reference gives after a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from proof.oracle.attention import Mixer, attending, load
from proof.oracle.kinds import Sight, exact_layers
from proof.oracle.reference import ExactCache, ReferenceCache, StateCache
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.by_layer import options_at

NOISE = 1e-6
"""Relative size of what float32 sums in another order change."""


class ReplayModel:
    """A checkpoint in float32 whose attention reads a format."""

    def __init__(
        self,
        path: str,
        format_name: str,
        block_size: int,
        num_spec: int = 0,
        kernel_error: float = 0.0,
        exact: Mapping[int, Sight] | None = None,
        **options: Any,
    ) -> None:
        """`kernel_error`: relative error of the attention output that the engine's kernels declare. `exact`: the layers
        that stay in vLLM's own cache, if not those that follow from the checkpoint and from the option skip_layers."""
        self.kernel_error = kernel_error
        self.noise: torch.Generator | None = None
        self.network = load(path)
        config = self.network.config.get_text_config()
        self.exact = exact_layers(config, options.get("skip_layers", ())) if exact is None else exact
        self.heads, self.num_spec = config.num_key_value_heads, num_spec
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.formats = [
            get_format(format_name).bind(
                Geometry(head_size, block_size, torch.float32, layer), options_at(options, layer)
            )
            for layer in range(config.num_hidden_layers)
        ]

    def perturb(self, seed: int) -> None:
        """From now on, disturb queries, keys and values as float32 rounding does, and outputs as the kernels may."""
        self.noise = torch.Generator().manual_seed(seed)

    def disturbed(self, x: torch.Tensor, size: float) -> torch.Tensor:
        """x with noise of `size` times its root mean square, once the replay is perturbed."""
        if self.noise is None:
            return x
        return x + size * x.square().mean().sqrt() * torch.randn(x.shape, generator=self.noise)

    def request(self) -> Replay:
        return Replay(self)

    def cache(self, layer: int, pages: list[Any] | None = None) -> Any:
        """Of a new request, in a layer with attention; `pages`: what a prefix hit found there."""
        if layer in self.exact:
            sight = self.exact[layer]
            return ExactCache.after_hit(sight, pages) if pages else ExactCache(sight)
        fmt = self.formats[layer]
        if pages:
            return ReferenceCache.after_hit(fmt, self.heads, pages, self.num_spec)
        return ReferenceCache(fmt, self.heads, self.num_spec)

    def after_hit(self, pages: list[Page]) -> Replay:
        """A request that found `pages` in the prefix cache."""
        new = Replay(self)
        new.length = len(pages) * self.formats[0].N
        new.caches = {layer: self.cache(layer, [page[0][layer] for page in pages]) for layer in pages[0][0]}
        new.states = {layer: StateCache.after_hit([page[1][layer] for page in pages]) for layer in pages[0][1]}
        return new


Page = tuple[dict[int, Any], dict[int, torch.Tensor]]
"""By layer: what those with attention keep of a page's tokens, and what those with a state were given."""


class Replay:
    """One request."""

    def __init__(self, model: ReplayModel) -> None:
        self.model, self.length = model, 0
        self.caches: dict[int, Any] = {}
        self.states: dict[int, StateCache] = {}

    def rewind(self, length: int) -> None:
        self.length = length
        for cache in self.caches.values():
            cache.rewind(length)

    def page(self, index: int) -> Page:
        n = self.model.formats[0].N
        caches = {i: c.page(index, n) if isinstance(c, ExactCache) else c.page(index) for i, c in self.caches.items()}
        return caches, {i: state.page(index, n) for i, state in self.states.items()}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        learned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of the chunk's own tokens, which the layer's cache takes in."""
        q, k, v = (self.model.disturbed(x, NOISE) for x in (q, k, v))
        if layer not in self.caches:
            self.caches[layer] = self.model.cache(layer)
        self.caches[layer].learned = learned
        return self.model.disturbed(self.caches[layer].step(q, k, v, scale), self.model.kernel_error)

    def mix(self, layer: int, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        return self.states.setdefault(layer, StateCache()).step(mixer, self.model.disturbed(hidden, NOISE))

    @torch.no_grad()
    def step(self, tokens: list[int], logits: int = 1) -> torch.Tensor:
        """(logits, vocabulary) of the last positions of one chunk."""
        position = torch.arange(self.length, self.length + len(tokens))[None]
        self.length += len(tokens)
        with attending(self):
            out = self.model.network(
                input_ids=torch.tensor([tokens]), position_ids=position, use_cache=False, logits_to_keep=logits
            )
        return out.logits[0]
