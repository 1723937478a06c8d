"""Codecs for which an option selects another class.

Kernels look codecs up by their exact class, so a class represents exactly one meaning of the bytes and one way of
choosing them. An option that changes either is a class placed before the codec's own, a third party's included.
"""

from __future__ import annotations

import functools
from typing import TypeVar, cast

from vllm_kvq.formats.codec import Codec
from vllm_kvq.formats.parts.quant import fitted_parameters

C = TypeVar("C", bound=Codec)


@functools.cache
def variant(codec: type[C], *changes: type) -> type[C]:
    """The codec with these changes: the same class for the same arguments; the codec itself if there are none."""
    if not changes:
        return codec
    name = "".join(change.__name__ for change in (*changes, codec))
    return cast(type[C], type(name, (*changes, codec), {"__doc__": codec.__doc__, "__module__": codec.__module__}))


class Fitted:
    """`key_scales` or `value_scales`: fitted, for codecs with `parameters`. The meaning of the bytes is the same."""

    parameters = staticmethod(fitted_parameters)


def fitted(scales: str) -> tuple[type, ...]:
    """The change that such an option requires."""
    return (Fitted,) if scales == "fitted" else ()
