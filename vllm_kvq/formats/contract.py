"""What codecs promise (codec.py), as sentences about how one of them breaks it.

The built-in codecs' tests ask for more. This much is asked of another package's codec before a server loads weights,
and by `vllm-kvq conformance`.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.codec import Codec
from vllm_kvq.formats.constants import by_head
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.parts.fields import Packed
from vllm_kvq.formats.parts.planes import SLAB

FEATURES_BOUND = 1e-3
"""Relative error of f(q) . g(page) against q . unpack(page), which differ only by rounding in float32."""
HEADS, GROUP = 2, 2


def broken_promise(page: PageFormat) -> str | None:
    """The first promise that a codec of another package breaks, on a few random tokens."""
    if not any(map(_foreign, (page.keys, page.values))):
        return None
    try:
        return wrong_fields(page) or _wrong_on(page)
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _foreign(codec: Codec) -> bool:
    return type(codec).__module__.partition(".")[0] != __name__.partition(".")[0]


def _wrong_on(page: PageFormat) -> str | None:
    rng, d = torch.Generator().manual_seed(0), page.geometry.head_size
    key, value = torch.randn(2, HEADS, page.unit, d, generator=rng)
    query = page.widen(torch.randn(HEADS, GROUP * page.unit, d, generator=rng))[0]
    k, v = page.widen(key)[0], page.widen(value)[0]
    state = page.keys.fit(query, k, None) if page.state_rows else None
    fields = page.pack(k, v, state, None, torch.zeros(HEADS, dtype=torch.long))
    if sentence := wrong_packed(page, fields, HEADS):
        return sentence
    fields = stored(page, fields)
    return wrong_unpacked(page, fields, HEADS) or wrong_features(page, fields, query)


def wrong_fields(page: PageFormat) -> str | None:
    """What is wrong with the declared fields."""
    halves = (("k", page.keys), ("v", page.values))
    for prefix, codec in halves:
        for field in (*codec.slab_fields, *codec.page_fields):
            if not field.name.startswith(prefix):
                return f"field {field.name!r} of {type(codec).__name__} does not start with {prefix!r}"
    names = [f.name for _, codec in halves for f in (*codec.slab_fields, *codec.page_fields)]
    twice = {name for name in names if names.count(name) > 1}
    return f"field {min(twice)!r} is declared twice" if twice else None


def wrong_packed(page: PageFormat, fields: Packed, units: int) -> str | None:
    """What is wrong with the fields that `pack` returned for this many pack units."""
    slab, whole = page.slab_region.fields, page.page_region.fields
    shapes = {f.name: (units, page.unit // SLAB, *f.shape) for f in slab} | {f.name: (units, *f.shape) for f in whole}
    if missing := shapes.keys() - fields.keys():
        return f"pack returns no field {min(missing)!r}, which is declared"
    if extra := fields.keys() - shapes.keys() - {"position"}:
        return f"pack returns field {min(extra)!r}, which is not declared"
    for field in (*slab, *whole):
        x, shape = fields[field.name], shapes[field.name]
        if tuple(x.shape) != shape:
            return f"pack returns field {field.name!r} of shape {tuple(x.shape)}, not {shape}"
        if not torch.isfinite(x.float() if x.dtype.is_floating_point else x).all():
            return f"field {field.name!r} holds numbers that are not finite"
        if not field.dtype.is_floating_point and not torch.equal(x.to(field.dtype).to(x.dtype), x):
            return f"field {field.name!r} holds numbers that {field.dtype} can't"
        if field.dtype.is_floating_point and not torch.isfinite(x.to(field.dtype).float()).all():
            return f"field {field.name!r} holds numbers beyond the range of {field.dtype}"
    return None


def stored(page: PageFormat, fields: Packed) -> Packed:
    """The fields of `pack` in the dtypes in which they are read again."""
    dtypes = {f.name: f.dtype for f in (*page.slab_region.fields, *page.page_region.fields)}
    return {name: x.to(dtypes.get(name, x.dtype)) for name, x in fields.items()}


def wrong_unpacked(page: PageFormat, fields: Packed, units: int) -> str | None:
    """What is wrong with what `unpack` makes of these fields, which are as stored."""
    shape = (units, page.unit, page.geometry.d)
    for half, codec in (("keys", page.keys), ("values", page.values)):
        x = codec.unpack(fields)
        if tuple(x.shape) != shape or x.dtype != torch.float32:
            return f"unpack returns {half} as {x.dtype} of shape {tuple(x.shape)}, not torch.float32 of {shape}"
        if not x.isfinite().all():
            return f"unpack returns {half} that are not finite"
    return None


def wrong_features(page: PageFormat, fields: Packed, query: torch.Tensor) -> str | None:
    """What is wrong with the scores of these queries (KV heads, n, d), which kernels compute from features."""
    key, g = (by_head(x, len(query)) for x in (page.unpack(fields)[0], page.key_features(fields)))
    f = page.query_features(query)
    if f.shape[-1] != g.shape[-1]:
        return f"query_features returns {f.shape[-1]} numbers for a query, and key_features {g.shape[-1]} for a key"
    want, got = query @ key.mT, f @ g.mT
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    if not error <= FEATURES_BOUND:
        return f"query_features(q) . key_features(page) differs from q . unpack(page) by {error:.0e}"
    return None
