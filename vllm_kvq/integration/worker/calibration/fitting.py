"""The constants of the packed layers: read, or fitted by a run over the bundled text; the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_kvq.formats.constants import Constants, Moments
from vllm_kvq.formats.parts.turning import Turning
from vllm_kvq.integration.plan.calibration import Source, digest_of, read, write
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.worker.binding import rope_of_layer
from vllm_kvq.integration.worker.calibration.attending import attending
from vllm_kvq.integration.worker.calibration.text import Pieces, bundled, hardly_known, pieces
from vllm_kvq.problem import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger("vllm.kvq")

AT_ONCE = 2048
"""Tokens in a forward pass: the same in all servers with room for as many, and so are the constants, to the bit."""


@dataclass
class OwnTexts:
    texts: Sequence[str]
    tokens: int = 0
    """Those that constants have been fitted to."""


_own: ContextVar[OwnTexts | None] = ContextVar("own_texts", default=None)


@contextmanager
def fitting_to(texts: Sequence[str]) -> Iterator[OwnTexts]:
    """A start in this process fits its constants to these texts, whatever files there are, and leaves none."""
    before = _own.set(own := OwnTexts(texts))
    try:
        yield own
    finally:
        _own.reset(before)


def calibrate(worker: WorkerBase) -> None:
    """Give all packed layers of this worker their constants. Called once the weights are loaded."""
    config: VllmConfig = worker.vllm_config
    served = plan(config)
    if served.calibration is None:
        return
    try:
        # the weights may have been downloaded since
        source = Source.of(config, served.options, sorted(served.layers.packed_layers))
        found = None if source is None or _own.get() is not None else _agreed(source)
    except ValueError as error:
        raise Refused(str(error)) from None
    if source is None:
        return
    layers = config.compilation_config.static_forward_context
    packed = {name: layer for name, layer in layers.items() if getattr(_impl(layer), "packed", None) is not None}
    if found is None:
        found = _fitted(worker, packed, source)
    constants, digest = found
    ranks, device = _Ranks.of(config), config.device_config.device
    for layer in packed.values():
        own = layer.impl.packed
        index = own.fmt.geometry.layer
        heads = ranks.own(constants[index], layer.impl.num_kv_heads)
        own.calibrate(heads.each(lambda x: x.to(device)), digest)


def _impl(layer: Any) -> Any:
    return getattr(layer, "impl", None)


def _agreed(source: Source) -> tuple[dict[int, Constants], str] | None:
    """What the first rank reads, on all ranks; None if there is nothing to be read."""
    group = _group()
    told: list[Any] = [None]
    if group.rank_in_group == 0:
        try:
            told = [None if source.found is None or source.path is None else read(source.path)]
        except ValueError as error:
            told = [error]
    _broadcast(told)
    if isinstance(told[0], ValueError):
        raise told[0]
    found: tuple[dict[int, Constants], str] | None = told[0]
    return found


def _fitted(worker: WorkerBase, packed: Mapping[str, Any], source: Source) -> tuple[dict[int, Constants], str]:
    config: VllmConfig = worker.vllm_config
    started = time.monotonic()
    first = _group().rank_in_group == 0
    text, turned = _text(config), _turned(worker)
    if first:
        logger.info("kvq: fitting the constants of the KV cache format to %d tokens of text, once", text.tokens.numel())
    sums = _run(worker, packed, text, turned)
    gathered: list[Any] = [None] * _group().world_size
    torch.distributed.all_gather_object(gathered, sums, group=_group().cpu_group)
    told: list[Any] = [None]
    if first:
        ranks = _Ranks.of(config)
        formats = {name: layer.impl.packed.fmt for name, layer in packed.items()}
        constants = {
            fmt.geometry.layer: fmt.fitted_to(ranks.joined([of_rank[name] for of_rank in gathered]), turned(name))
            for name, fmt in formats.items()
        }
        told = [(constants, digest_of(constants))]
        _keep(source, constants)
        logger.info("kvq: fitted in %.0f s", time.monotonic() - started)
    _broadcast(told)
    found: tuple[dict[int, Constants], str] = told[0]
    return found


def _text(config: VllmConfig) -> Pieces:
    from vllm.tokenizers import get_tokenizer

    model = config.model_config
    try:
        # even where vLLM does without one
        tokenizer = get_tokenizer(
            model.tokenizer or model.model,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            tokenizer_mode=model.tokenizer_mode,
        )
    except Exception as error:
        raise Refused(
            f"the model has no tokenizer for the text to which constants are fitted ({type(error).__name__}); "
            "name a file of constants with the option 'calibration', or use --kv-cache-dtype kitty2"
        ) from error
    longest = getattr(model.hf_text_config, "max_position_embeddings", None) or model.max_model_len
    own = _own.get()
    found = bundled(tokenizer, longest) if own is None else pieces(tokenizer, own.texts, longest)
    # no more at once than any step has: what vLLM and its layers have room for
    found = found._replace(tokens=found.tokens[:, : config.scheduler_config.max_num_batched_tokens])
    if hardly_known(found.tokens):
        raise Refused(
            "most of the text to which constants are fitted is one and the same token to this model; fit them to text "
            "that it knows (vllm-kvq calibrate MODEL --text FILE), or use --kv-cache-dtype kitty2"
        )
    if own is not None:
        own.tokens = found.tokens.numel()
    return found


def _turned(worker: WorkerBase) -> Callable[[str], Turning]:
    """How RoPE turns a layer's keys, by its name. Not at all where tokens don't have the positions at which they lie in
    the cache (M-RoPE: those of an image share some), or where nothing tells."""
    model = worker.get_model()
    layers = worker.vllm_config.compilation_config.static_forward_context

    def turned(name: str) -> Turning:
        rope = None if worker.vllm_config.model_config.uses_mrope else rope_of_layer(model, name)
        return Turning.of(rope, layers[name].head_size)

    return turned


@torch.inference_mode()
def _run(
    worker: WorkerBase, packed: Mapping[str, Any], text: Pieces, turned: Callable[[str], Turning]
) -> dict[str, Moments]:
    """The sums of this rank's heads, by layer, on the host."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config: VllmConfig = worker.vllm_config
    model, device = worker.get_model(), config.device_config.device
    length = text.tokens.shape[1]
    at_once = max(1, min(AT_ONCE, config.scheduler_config.max_num_batched_tokens) // length)
    sinks = next(iter(packed.values())).impl.packed.fmt.S
    with attending(config.compilation_config.static_forward_context, turned, sinks) as layers:
        for some in range(0, len(text.tokens), at_once):
            batch = text.tokens[some : some + at_once]
            ids = batch.flatten().to(device)
            of_pieces = text.positions[some : some + at_once].to(device)
            for stand_in in layers.values():
                stand_in.positions = of_pieces
            positions = of_pieces.flatten()
            if config.model_config.uses_mrope:
                positions = positions.expand(3, -1).contiguous()
            if config.lora_config is not None:
                # no adapter; until vLLM is told so, the choice is memory that nobody has written to
                worker.model_runner._set_active_loras((0,) * len(batch), (0,) * len(ids), set())
            with set_current_vllm_config(config), set_forward_context(None, config, len(ids), skip_compiled=True):
                model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        return {name: _on_host(layers[name].moments) for name in packed}


def _on_host(moments: Moments | None) -> Moments:
    if moments is None:
        raise RuntimeError("the model's forward pass has not reached one of its attention layers")
    if not (moments.keys.isfinite().all() and moments.queries.isfinite().all()):
        raise Refused(
            "this model's queries or keys are not finite on the text to which constants are fitted; use "
            "--kv-cache-dtype auto, or another --dtype"
        )
    return Moments(*(getattr(moments, f.name).cpu() for f in fields(moments)))


def _keep(source: Source, constants: Mapping[int, Constants]) -> None:
    if _own.get() is not None:
        return
    if source.path is None:
        logger.warning("kvq: there is no place for the constants, so every start fits them again")
        return
    try:
        write(source.path, constants, source.belongs)
    except OSError as error:
        logger.warning(
            "kvq: the constants can't be kept in %s (%s), so every start fits them again", source.path, error.strerror
        )
        return
    logger.info("kvq: the constants are kept in %s", source.path)


# -- ranks -----------------------------------------------------------------------------------------------------------
def _group() -> GroupCoordinator:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def _broadcast(told: list[Any]) -> None:
    group = _group()
    torch.distributed.broadcast_object_list(told, src=group.ranks[0], group=group.cpu_group)


class _Ranks:
    """Which KV heads the tensor parallel ranks have: each its share, or several neighbours a copy of the same."""

    def __init__(self, rank: int, copies: int) -> None:
        self.rank, self.copies = rank, copies

    @classmethod
    def of(cls, config: VllmConfig) -> _Ranks:
        group = _group()
        return cls(group.rank_in_group, max(1, group.world_size // config.model_config.get_total_num_kv_heads()))

    def joined(self, of_ranks: list[Moments]) -> Moments:
        """The sums of all heads of the model."""
        sums = [sum(of_ranks[i + 1 : i + self.copies], of_ranks[i]) for i in range(0, len(of_ranks), self.copies)]
        return Moments(*(torch.cat([getattr(x, f.name) for x in sums]) for f in fields(Moments)))

    def own(self, constants: Constants, heads: int) -> Constants:
        """Those of this rank's heads."""
        first = self.rank // self.copies * heads
        return constants.each(lambda x: x[first : first + heads])
