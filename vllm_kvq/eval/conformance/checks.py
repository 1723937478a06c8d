"""The checks. Each takes a trial and returns a sentence about what is wrong, or None."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvq.eval.conformance.trial import GROUP, Trial
from vllm_kvq.formats import contract
from vllm_kvq.formats.page import FLAGS_AT
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.quant import LIMIT
from vllm_kvq.kernels.paths import Wish, kernels_for, path_for
from vllm_kvq.kernels.torch.lists import PageList

ATTENTION_BOUND = 2e-2
"""Relative error of attention: integer kernels round queries and weights to 8 bits."""
SPECIAL = (math.nan, math.inf, -math.inf, 3e38, 1e-40, 0.0)


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    find: Callable[[Trial], str | None]
    stops: bool = False
    """Whether the checks after it make no sense if it fails."""


def declared(trial: Trial) -> str | None:
    return contract.wrong_fields(trial.page)


def packed(trial: Trial) -> str | None:
    return contract.wrong_packed(trial.page, trial.fields, len(trial.units(trial.key)))


def unpacked(trial: Trial) -> str | None:
    fields = contract.stored(trial.page, trial.fields)
    return contract.wrong_unpacked(trial.page, fields, len(trial.units(trial.key)))


def stored(trial: Trial) -> str | None:
    page = trial.page
    back = page.read(trial.pool, torch.arange(1, len(trial.pool)))
    for region, grouped in ((page.slab_region, True), (page.page_region, False)):
        for field in region.fields:
            want = trial.fields[field.name].to(field.dtype)
            got = back[field.name]
            per_page = page.N // page.unit
            if grouped:
                want = want.unflatten(0, (-1, per_page, trial.heads)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            else:
                want = want.unflatten(0, (-1, per_page, trial.heads))[:, -1].flatten(0, 1)
            if not torch.equal(got, want):
                return f"field {field.name!r} is read differently from how it was written"
    return None


def finite(trial: Trial) -> str | None:
    page = trial.page
    for special in SPECIAL:
        key, value = trial.key.clone(), trial.value.clone()
        key[3, 0, 5], key[40 : 40 + SLAB, 0, 7], value[5, 0, 9], value[6, 0] = special, special, special, special
        for name, x in zip(("keys", "values"), page.unpack(trial.pack(key, value)), strict=True):
            if not x.isfinite().all():
                return f"{name} that contain {special} are read back as numbers that are not finite"
            if x.abs().max() > 4 * LIMIT:
                return f"{name} that contain {special} are read back as large as {x.abs().max():.1e}"
    zero = torch.zeros_like(trial.key)
    for name, x in zip(("keys", "values"), page.unpack(trial.pack(zero, zero)), strict=True):
        if not x.isfinite().all():
            return f"{name} that are all 0 are read back as numbers that are not finite"
    return None


def deterministic(trial: Trial) -> str | None:
    if not torch.equal(trial.written(trial.pack(trial.key, trial.value)), trial.pool):
        return "packing the same tokens twice gives different bytes"
    key, value = trial.key.clone(), trial.value.clone()
    key[-trial.page.N :], value[-trial.page.N :] = -2 * key[-trial.page.N :], 3 * value[-trial.page.N :]
    if not torch.equal(trial.written(trial.pack(key, value))[1], trial.pool[1]):
        return "a page's bytes depend on tokens of another page"
    return None


def features(trial: Trial) -> str | None:
    page = trial.page
    fields = page.read(trial.pool, torch.arange(1, len(trial.pool)))
    queries = page.widen(trial.query[: 2 * SLAB, ::GROUP])[0]
    return contract.wrong_features(page, fields, queries.transpose(0, 1))


def state(trial: Trial) -> str | None:
    page = trial.page
    if not page.state_rows:
        return None
    want = (trial.heads, page.state_rows, page.geometry.d)
    half = len(trial.key) // 2
    queries = page.widen(trial.query)[0].unflatten(1, (trial.heads, -1)).transpose(0, 1)
    keys = page.widen(trial.key)[0].transpose(0, 1)
    first = page.keys.fit(queries[:, :half].flatten(1, 2), keys[:, :half], None)
    for x in (first, page.keys.fit(queries[:, half:].flatten(1, 2), keys[:, half:], first)):
        if tuple(x.shape) != want or x.dtype != torch.float32:
            return f"fit returns {x.dtype} of shape {tuple(x.shape)}, not float32 of {want}"
        if not x.isfinite().all():
            return "fit returns numbers that are not finite"
    return None


def attention(trial: Trial) -> str | None:
    """The kernels that would serve here, against float64 over what `unpack` reads."""
    page = trial.page
    if page.reference_only is not None:
        return None
    seen = len(trial.key) - SLAB // 2
    kernels, scale = kernels_for(page, Wish.of("cpu", os.environ)), page.geometry.head_size**-0.5
    query = trial.query[:3].unsqueeze(0)
    out, _ = kernels.attend_packed(page, query, trial.pool, _listed(trial, seen), scale)
    fields = page.read(trial.pool, torch.arange(1, len(trial.pool)))
    key, value = (
        x[..., : page.geometry.head_size].unflatten(0, (-1, trial.heads)).transpose(0, 1).flatten(1, 2)[:, :seen]
        for x in page.unpack(fields)
    )
    rows = page.widen(query[0])[0][..., : page.geometry.head_size].double().unflatten(1, (trial.heads, -1))
    weights = (torch.einsum("qhgd,htd->qhgt", rows, key.double()) * scale).softmax(-1)
    want = torch.einsum("qhgt,htd->qhgd", weights, value.double()).flatten(1, 2)
    error = ((out[0] - want).norm() / want.norm()).item()
    if not error <= ATTENTION_BOUND:
        path = path_for(page, Wish.of("cpu", os.environ)).name
        return f"attention by the {path} kernels differs from that over unpack(page) by {error:.0e}"
    return None


def unseen(trial: Trial) -> str | None:
    """Bytes of a block's last owner, in slabs that no query sees, change nothing."""
    page = trial.page
    if page.reference_only is not None:
        return None
    seen = page.N + (page.N - page.unit if page.unit < page.N else 0)
    damaged = trial.pool.clone()
    first = (seen - page.N) // SLAB
    damaged[2, :, page.slabs_at + first * page.slab_region.nbytes :] = 0xFF
    damaged[2, :, FLAGS_AT + first : FLAGS_AT + page.slabs] = 0
    kernels = kernels_for(page, Wish.of("cpu", os.environ))
    query = trial.query[:1].unsqueeze(0)
    got, want = (
        kernels.attend_packed(page, query, pool, _listed(trial, seen), 0.1)[0] for pool in (damaged, trial.pool)
    )
    if not torch.equal(got, want):
        return "bytes of slabs that were never packed change the output"
    return None


def _listed(trial: Trial, seen: int) -> PageList:
    """The first `seen` tokens of the trial's request."""
    ids = torch.arange(1, 1 + -(-seen // trial.page.N))
    zero = torch.zeros_like(ids)
    return PageList(ids, zero, zero, (seen - (ids - 1) * trial.page.N).clamp_max(trial.page.N))


CHECKS = (
    Check("fields", "names of fields start with k or v, and none is declared twice", declared, stops=True),
    Check(
        "pack", "pack returns the declared fields, of their shapes and within their types' range", packed, stops=True
    ),
    Check("unpack", "unpack returns finite float32 of the tokens' shape", unpacked, stops=True),
    Check("bytes", "a page's bytes hold every field unchanged", stored),
    Check("finite", "NaN, infinities, huge numbers and zeros are read back as finite numbers", finite),
    Check("determinism", "the same tokens give the same bytes, whatever other pages hold", deterministic),
    Check("features", "query_features(q) . key_features(page) is q . unpack(page)", features),
    Check("state", "fit returns the declared rows, chunk after chunk", state),
    Check("attention", "the kernels that serve here read what unpack reads", attention),
    Check("damage", "what was left in a block by its last owner changes nothing", unseen),
)
