"""Step-by-step replay: the same model, in Transformers, over our reference cache.

The replay runs the scheduler's chunks over the engine's own tokens, so that each step is judged by itself:
`Replay.step` returns the logits that the reference gives after a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from proof.oracle.adapters import Adapters
from proof.oracle.pictures import Shown
from proof.oracle.reference.attention import Attention, Mixer, attending, load
from proof.oracle.reference.constants import constants_of, with_constants
from proof.oracle.reference.kinds import Sight, exact_layers
from proof.oracle.reference.reference import ExactCache, ReferenceCache, StateCache
from proof.oracle.structured import Vocabulary
from proof.oracle.trace import Request
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.by_layer import options_at

NOISE = 1e-6
"""Relative change of float32 sums when they are taken in another order."""


def sharing_layers(config: Any) -> dict[int, int]:
    """The layers without their own cache, each with the one whose cache it reads: the last of its kind."""
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or []
    return {
        layer: max(i for i in range(first) if kinds[i] == kinds[layer])
        for layer in range(first, config.num_hidden_layers)
    }


def layer_configs(config: Any) -> list[Any]:
    """Each layer's configuration: in some models layers have different heads."""
    alone = getattr(config, "per_layer_config", None)
    return [alone[i] if alone else config for i in range(config.num_hidden_layers)]


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
        layers = layer_configs(config)
        skipped = get_format(format_name).settings(options_at(options, None)).skipped(len(layers))
        self.exact = exact_layers(config, skipped) if exact is None else exact
        self.num_spec = num_spec
        self.heads = [config.num_key_value_heads for config in layers]
        sizes = [getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads for c in layers]
        self.formats = [
            get_format(format_name).bind(Geometry(size, block_size, torch.float32, layer), options_at(options, layer))
            for layer, size in enumerate(sizes)
        ]
        constants = constants_of(path, format_name, options)
        self.formats = [with_constants(fmt, constants, layer) for layer, fmt in enumerate(self.formats)]
        self.shared = sharing_layers(config)
        self.shown, self.adapters = Shown(path, self.network), Adapters(path, self.network)
        self.vocabulary = Vocabulary(path, config.vocab_size)

    def perturb(self, seed: int) -> None:
        """From now on, disturb queries, keys and values as float32 rounding does, and outputs as the kernels may."""
        self.noise = torch.Generator().manual_seed(seed)

    def disturbed(self, x: torch.Tensor, size: float) -> torch.Tensor:
        """x with noise of `size` times its root mean square, once the replay is perturbed."""
        if self.noise is None:
            return x
        return x + size * x.square().mean().sqrt() * torch.randn(x.shape, generator=self.noise)

    def logits(
        self,
        attention: Attention,
        tokens: torch.Tensor,
        position: torch.Tensor,
        rows: Sequence[tuple[Request | None, slice]],
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """(kept, vocabulary) logits behind these tokens, at these positions of their requests, for the last `keep` or
        for those that it names; `rows`: which of the tokens belong to a request."""
        inputs = {"input_ids": tokens[None], "position_ids": position[None]}
        if any(asked is not None and asked.pictures for asked, _ in rows):
            inputs = self.shown.inputs(tokens, position, rows)
        with attending(attention), self.adapters.of(rows):
            out = self.network(**inputs, use_cache=False, logits_to_keep=keep)
        return out.logits[0]

    def request(self, asked: Request | None = None) -> Replay:
        """`asked`: the request, whose prompt may hold pictures, and which may have an adapter."""
        return Replay(self, asked)

    def cache(self, layer: int, pages: list[Any] | None = None) -> Any:
        """A new request's cache in a layer with attention; `pages`: what a prefix hit found there."""
        if layer in self.exact:
            sight = self.exact[layer]
            return ExactCache.after_hit(sight, pages) if pages else ExactCache(sight)
        fmt = self.formats[layer]
        if pages:
            return ReferenceCache.after_hit(fmt, self.heads[layer], pages, self.num_spec)
        return ReferenceCache(fmt, self.heads[layer], self.num_spec)

    def after_hit(self, pages: list[Page], asked: Request | None = None) -> Replay:
        """A request that found `pages` in the prefix cache."""
        new = Replay(self, asked)
        new.length = len(pages) * self.formats[0].N
        new.caches = {layer: self.cache(layer, [page[0][layer] for page in pages]) for layer in pages[0][0]}
        new.states = {layer: StateCache.after_hit([page[1][layer] for page in pages]) for layer in pages[0][1]}
        return new


Page = tuple[dict[int, Any], dict[int, torch.Tensor]]
"""By layer: what those with attention keep of a page's tokens, and what those with a state were given."""


class Replay:
    """One request."""

    def __init__(self, model: ReplayModel, asked: Request | None = None) -> None:
        self.model, self.asked, self.length = model, asked, 0
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
        cap: float = 0.0,
        learned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention for the chunk's own tokens, which the layer's cache takes in."""
        q, k, v = (self.model.disturbed(x, NOISE) for x in (q, k, v))
        owner = self.model.shared.get(layer, layer)
        if owner not in self.caches:
            self.caches[owner] = self.model.cache(owner)
        cache = self.caches[owner]
        cache.learned = learned
        out = cache.step(q, k, v, scale, cap) if owner == layer else cache.share(q, scale, cap)
        return self.model.disturbed(out, self.model.kernel_error)

    def mix(self, layer: int, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        return self.states.setdefault(layer, StateCache()).step(mixer, self.model.disturbed(hidden, NOISE))

    @torch.no_grad()
    def step(self, tokens: list[int], logits: int = 1) -> torch.Tensor:
        """(logits, vocabulary) of the last positions of one chunk."""
        position = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        return self.model.logits(self, torch.tensor(tokens), position, [(self.asked, slice(None))], logits)
