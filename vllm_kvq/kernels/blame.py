"""Finds the option that keeps kernels from serving a format that they would serve without it."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvq.formats import PageFormat, get_format
from vllm_kvq.formats.settings import COMMON
from vllm_kvq.formats.table import key_codecs, value_codecs


def blamed(fmt: PageFormat, serves: Callable[[PageFormat], bool]) -> str:
    """ " with r=40" if it would be served with the default for `r`; "" if no single option is to blame."""
    named = get_format(fmt.name)
    common = {option.name: getattr(fmt.settings, option.name) for option in COMMON}
    kept = chosen_codecs(fmt) | {name: value for name, value in common.items() if value is not None}
    default = named.settings(kept)
    own = {name: value for name, value in fmt.settings.own if value is not None}
    for name, value in own.items():
        others = {other: x for other, x in own.items() if other != name}
        if value != default.get(name) and serves(named.bind(fmt.geometry, kept | others)):
            return f" with {name}={value}"
    return ""


def chosen_codecs(fmt: PageFormat) -> dict[str, str]:
    """The options that selected codecs other than those of the format's name."""
    named, settings = get_format(fmt.name), fmt.settings
    chosen = {}
    if settings.keys is not named.keys:
        chosen["keys"] = next(name for name, codec in key_codecs().items() if codec is settings.keys)
    if settings.values is not named.values:
        chosen["values"] = next(name for name, codec in value_codecs().items() if codec is settings.values)
    return chosen
