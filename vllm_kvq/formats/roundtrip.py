"""`roundtrip`: the effect of a format on keys and values, without vLLM."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.constants import Calibration, grouped
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.parts.fields import round_up
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.settings import BLOCK, COMMON
from vllm_kvq.formats.table import DEFAULT_N, get_format

MOST_HEADS = 256
"""More than any model has: they are tokens, in the place of heads."""


def roundtrip(
    name: str,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor | None = None,
    turned: Rope | None = None,
    calibration: Calibration | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(key_hat, value_hat): every token quantized by format `name`, no window, no sinks.

    key and value are (tokens, heads, head_size), query (tokens, query heads, head_size): the prompt's queries, from
    which SQuat fits its subspace; SQuat's formats need it, others read none. (heads, tokens, head_size), as
    Transformers and SDPA have it, can't be told from that unless there are more than 256 tokens, and would group the
    wrong numbers: x.transpose(0, 1) first. For QJL key_hat is the linear reconstruction: q . key_hat is QJL's
    estimator.
    `turned` is the RoPE already applied to keys and queries, token t at position t, which formats that store keys
    before RoPE undo; None: no RoPE has been applied.
    `calibration` is another text's queries, keys and values, to which calibrated formats fit their constants.
    `options` are the format's; those about tokens or layers that are not packed (W, S, recompute, skip_layers) are
    refused. Incomplete groups at the end are completed by repeating the last token.
    """
    if exact := ({option.name for option in COMMON} - {BLOCK.name}) & options.keys():
        raise ValueError(f"roundtrip quantizes every token of one layer, so it takes no option {min(exact)!r}")
    _check(key, value, query)
    tokens, _, head_size = key.shape
    fmt = get_format(name)
    dtype = key.dtype if key.dtype in (torch.float16, torch.bfloat16) else torch.float32
    options["S"] = 0
    page = fmt.bind(Geometry(head_size, fmt.settings(options).N or DEFAULT_N, dtype, rope=turned), options)
    if query is None and page.keys.fits_queries:
        raise ValueError(
            f"{name} is fitted to a prompt's queries; give them as `query`, (tokens, query heads, head_size)"
        )
    if page.calibrated:
        if calibration is None:
            raise ValueError(f"{name} has constants that are fitted to another text; give it as `calibration`")
        page = page.calibrated_on(calibration)
    if tokens == 0:
        return key.clone(), value.clone()
    return through_pages(page, key, value, fitted(page, key, query))


def _check(key: torch.Tensor, value: torch.Tensor, query: torch.Tensor | None) -> None:
    for name, x in {"key": key, "value": value, "query": query}.items():
        if x is None and name == "query":
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor, which torch.as_tensor makes")
        if not x.is_floating_point():
            raise ValueError(f"{name} is of {x.dtype}; it must hold floating point numbers; use {name}.float()")
    if key.shape != value.shape or key.dim() != 3 or not key.shape[1]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be (tokens, heads, head_size)"
        )
    if key.shape[1] > MOST_HEADS:
        raise ValueError(
            f"key {tuple(key.shape)} would have {key.shape[1]} heads; it must be (tokens, heads, head_size), "
            "which x.transpose(0, 1) makes of (heads, tokens, head_size)"
        )
    if query is not None and (query.dim() != 3 or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]):
        raise ValueError(
            f"query {tuple(query.shape)} must be (tokens, query heads, head_size) with the keys' head_size "
            f"{key.shape[2]} and a multiple of their {key.shape[1]} heads"
        )


def fitted(page: PageFormat, key: torch.Tensor, query: torch.Tensor | None) -> torch.Tensor | None:
    """The key codec's state after a prompt: (heads, state rows, d); None if it has no state."""
    if not page.state_rows:
        return None
    k = _before_rope(page, key).transpose(0, 1)
    return page.keys.fit(grouped(_before_rope(page, query), len(k)) if query is not None else k, k, None)


def _before_rope(page: PageFormat, x: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, d) of the first tokens, as passed to `fit`."""
    return page.before_rope(page.widen(x)[0], torch.arange(len(x))[:, None])


def through_pages(
    page: PageFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor | None,
    prompt: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, heads, head_size) as read from pages that they fill from the first token on.

    Units that end after the first `prompt` tokens are completed by decode steps; None: prompts complete all of them.
    """
    tokens, heads, head_size = key.shape
    k, v = (page.widen(x.transpose(0, 1))[0] for x in (key, value))
    at = torch.arange(round_up(tokens, page.unit)).clamp_max(tokens - 1)
    units = len(at) // page.unit
    k, v = (x[:, at].unflatten(1, (units, -1)).transpose(0, 1).flatten(0, 1) for x in (k, v))
    if state is not None:
        state = state.repeat(units, 1, 1)
    position = torch.arange(0, len(at), page.unit).repeat_interleave(heads)
    decoded = None if prompt is None else position + page.unit > prompt
    k, v = page.unpack(page.pack(k, v, state, decoded, position))
    k, v = (x.unflatten(0, (units, heads)).transpose(1, 2).flatten(0, 1)[:tokens, :, :head_size] for x in (k, v))
    return k.to(key.dtype), v.to(value.dtype)
