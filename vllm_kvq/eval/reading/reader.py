"""A checkpoint in transformers whose attention is ours: the exact pass over a text, and passes that read pages.

Weights and activations are float32; keys and values are rounded to the checkpoint's dtype as in a 16-bit cache.
No part of the model is reimplemented: transformers allows a function to replace its attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_kvq.eval.heads.capture import Captured, Layer
from vllm_kvq.eval.reading.attention import Packed, Scores, attend
from vllm_kvq.formats.parts.rope import PAIRINGS, Rope

NAME = "kvq_reading"
INSTEAD = "use the teacher-forced regime, which runs vLLM"
SERVED_LAYERS = ("full_attention", "sliding_attention")
TRIED = 48
"""The number of tokens on which a model with our attention is compared with the model itself."""
NEAR = 1e-3
"""The largest accepted difference of their logits, in units of the logits' spread."""


class Unreadable(ValueError):
    """One sentence on why this regime can't measure the model."""


class Cache(Protocol):
    """What a format stores, as read by a layer's last tokens."""

    def __call__(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> Reads:
        """`layer` is what the exact pass left of the earlier tokens; `key` and `value` (tokens, heads, d) are exact, of
        all tokens."""


@dataclass(frozen=True)
class Reads:
    key: torch.Tensor
    """(tokens, heads, d), read for positions without a page."""
    value: torch.Tensor
    packed: Packed | None = None


# -- attention as transformers calls it ------------------------------------------------------------------------------
@dataclass
class _Pass:
    """One forward pass: where it starts, what precedes it, how it reads."""

    dtype: torch.dtype | None
    """The dtype to which keys and values are rounded; None: they are not rounded."""
    past: Mapping[int, Layer] = field(default_factory=dict)
    cache: Cache | None = None
    seen: dict[int, Layer] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    keep: bool = False

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """(heads, n, d) each."""
        self.asked.add(index)
        if self.dtype is not None:
            key, value = (x.to(self.dtype).float() for x in (key, value))
        if scores.window is not None:
            self.windows[index] = scores.window
        if self.keep:
            q, k, v = (x.to(self.dtype or x.dtype).transpose(0, 1).contiguous() for x in (query, key, value))
            self.seen[index] = Layer(index, q, k, v, scores.scale)
        if (before := self.past.get(index)) is None:
            return attend(query, key, value, scores)
        k, v = (
            torch.cat([old.float().transpose(0, 1), new], 1) for old, new in ((before.key, key), (before.value, value))
        )
        if self.cache is None:
            return attend(query, k, v, scores)
        reads = self.cache(before, k.transpose(0, 1), v.transpose(0, 1))
        return attend(query, reads.key.transpose(0, 1), reads.value.transpose(0, 1), scores, reads.packed)


_current: list[_Pass] = []


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(1, heads, n, d) each -> (1, n, heads, d)."""
    if len(query) != 1:
        raise Unreadable("the model computes attention over a batch of texts, but this regime reads one at a time")
    if others.get("s_aux") is not None:
        raise Unreadable("the model has learned sinks, which this regime does not support; " + INSTEAD)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window)
    out = _current[-1].attend(module.layer_idx, query[0], key[0], value[0], scores)
    return out.transpose(0, 1)[None], None


# -- a model ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Past:
    """What the exact pass leaves of a text's first tokens."""

    tokens: int
    layers: Mapping[int, Layer]
    """All layers, including those with a window."""
    captured: Captured
    """The same for formats: the layers that would be packed, and RoPE."""


class Reader:
    """Raises Unreadable with a sentence for a model that this regime can't measure."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import transformers

        transformers.AttentionInterface.register(NAME, _attention)
        config = transformers.AutoConfig.from_pretrained(folder)
        refuse(config)
        self.dtype = getattr(torch, dtype)
        with _quiet(transformers):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=NAME
            ).eval()
        self.layers = int(config.get_text_config().num_hidden_layers)
        self._check()

    @torch.no_grad()
    def before(self, tokens: tuple[int, ...]) -> Past:
        """The exact pass over a text's first tokens."""
        run = _Pass(self.dtype, keep=True)
        self._forward(run, tokens, 0, 1)
        packed = tuple(layer for index, layer in sorted(run.seen.items()) if index not in run.windows)
        if not packed:
            raise Unreadable("every layer of this model has a sliding window, so a server would pack none of them")
        # keys are read again after these tokens, so RoPE's table must extend beyond them
        return Past(
            len(tokens),
            run.seen,
            Captured(packed, tuple(sorted(run.windows)), *self._rope(packed[0]), total=self.layers),
        )

    @torch.no_grad()
    def logits(self, past: Past, tokens: tuple[int, ...], cache: Cache | None) -> torch.Tensor:
        """(len(tokens), vocabulary) after each of the following tokens; `cache` None: the exact one."""
        return self._forward(_Pass(self.dtype, past.layers, cache), tokens, past.tokens, len(tokens))

    def _forward(self, run: _Pass, tokens: tuple[int, ...], first: int, rows: int) -> torch.Tensor:
        ids = torch.tensor([tokens])
        position = torch.arange(first, first + len(tokens))[None]
        _current.append(run)
        try:
            out = self.model(input_ids=ids, position_ids=position, use_cache=False, logits_to_keep=rows)
        finally:
            _current.pop()
        return out.logits[0].float()

    @torch.no_grad()
    def _check(self) -> None:
        """Checks that our attention matches this model's: equal logits on a few tokens."""
        rng = torch.Generator().manual_seed(0)
        size = self.model.config.get_text_config().vocab_size
        tokens = tuple(torch.randint(size, (TRIED,), generator=rng).tolist())
        run = _Pass(None)
        ours = self._forward(run, tokens, 0, TRIED)
        if run.asked != set(range(self.layers)):
            raise Unreadable(
                f"attention of {len(run.asked)} of this model's {self.layers} layers goes through transformers' "
                f"interface for it; {INSTEAD}"
            )
        self.model.set_attn_implementation("eager")
        theirs = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        self.model.set_attn_implementation(NAME)
        if not (ours - theirs).abs().max() <= NEAR * theirs.std():
            raise Unreadable(
                "attention of this model does more than this regime supports: logits differ from the model's own; "
                f"{INSTEAD}"
            )

    # -- RoPE ----------------------------------------------------------------------------------------------------------
    def _rope(self, layer: Layer) -> tuple[str | None, int | None, Rope | None]:
        """How the model turns keys of packed layers, found by letting it turn some; None: can't be determined."""
        rope = _rope_of(self.model, layer.index, self.model.config.get_text_config().max_position_embeddings)
        return (None, None, None) if rope is None else (rope.pairing, rope.rotary_dim, rope)


def refuse(config: Any) -> None:
    """Refuses models that this regime does not support."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise Unreadable(f"{config.model_type} has an encoder, and this regime reads decoders; {INSTEAD}")
    if getattr(text, "kv_lora_rank", None):
        raise Unreadable(f"{config.model_type} caches latents (MLA) instead of keys and values; {INSTEAD}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise Unreadable(f"some layers of {config.model_type} read another layer's cache; {INSTEAD}")
    kinds = set(getattr(text, "layer_types", None) or SERVED_LAYERS)
    if others := sorted(kinds - set(SERVED_LAYERS)):
        raise Unreadable(
            f"{config.model_type} has layers of kind {others[0]}, which this regime does not support; {INSTEAD}"
        )


def _rope_of(model: Any, index: int, positions: int) -> Rope | None:
    modules = dict(model.named_modules())
    attention = next(
        (m for m in modules.values() if getattr(m, "layer_idx", None) == index and hasattr(m, "k_proj")), None
    )
    embedding = next((m for name, m in modules.items() if name.rsplit(".", 1)[-1] == "rotary_emb"), None)
    if attention is None or embedding is None:
        return None
    turn = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if turn is None:
        return None
    kind = (
        {"layer_type": attention.layer_type} if "layer_type" in inspect.signature(embedding.forward).parameters else {}
    )
    cos, sin = embedding(torch.zeros(1, 1, 1), torch.arange(positions)[None], **kind)
    size = cos.shape[-1]
    rng = torch.Generator().manual_seed(0)
    key = torch.randn(positions, size, generator=rng)

    def turned(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = turn(x[None, None], x[None, None], cos, sin)[1][0, 0]
        return found

    for pairing in PAIRINGS:
        # a pair (1, 0) becomes (c, s)
        one = torch.zeros(positions, size)
        first, second = (
            (slice(0, size // 2), slice(size // 2, size))
            if pairing == "half"
            else (slice(0, size, 2), slice(1, size, 2))
        )
        one[:, first] = 1
        out = turned(one)
        rope = Rope(torch.cat([out[:, first], out[:, second]], 1), pairing)
        if torch.allclose(rope.apply(key, torch.arange(positions)), turned(key), atol=1e-4):
            return rope
    return None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Loads without transformers' progress bar."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
