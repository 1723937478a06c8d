"""Codecs of which an option makes another class.

Kernels look codecs up by their exact class, so a class stands for exactly one meaning of the bytes and one way of
choosing them. An option that changes either is a class to be put before the codec's own, a third party's included.
"""

from __future__ import annotations

import functools
from typing import TypeVar, cast

from vllm_kvq.formats.codec import Codec
from vllm_kvq.formats.quant import fitted_parameters

C = TypeVar("C", bound=Codec)


@functools.cache
def variant(codec: type[C], *changes: type) -> type[C]:
    """The codec changed so: the same class for the same arguments, and the codec itself without changes."""
    if not changes:
        return codec
    name = "".join(change.__name__ for change in (*changes, codec))
    return cast(type[C], type(name, (*changes, codec), {"__doc__": codec.__doc__}))


class Fitted:
    """`key_scales` or `value_scales`: fitted, of codecs with `parameters`. The bytes mean the same."""

    parameters = staticmethod(fitted_parameters)


def fitted(scales: str) -> tuple[type, ...]:
    """The change that such an option asks for."""
    return (Fitted,) if scales == "fitted" else ()
