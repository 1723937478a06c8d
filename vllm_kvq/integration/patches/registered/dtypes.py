"""The names of our formats as values of --kv-cache-dtype.

vLLM 0.33 lets plugins register a KV cache dtype. 0.32 does not: its `CacheDType` is a `Literal`, and the pydantic
classes made from it have to be built again after it is widened. Both versions list every registered name in their help
and error messages; the formats that only tests use are accepted there and not listed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch

from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.integration.patches.once import once
from vllm_kvq.integration.patches.patch import Hooks, Patch
from vllm_kvq.meant import meant

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs.add_cli_args"


def names() -> tuple[str, ...]:
    """What --kv-cache-dtype takes in addition to vLLM's own: formats and budgets."""
    return (*FORMATS, *BUDGETS)


def widen_literal(_: Hooks) -> None:
    import vllm.config.cache as cache
    import vllm.utils.torch_utils as torch_utils
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import CacheConfig, VllmConfig

    literal: Any = cache.CacheDType
    unknown = tuple(name for name in names() if name not in literal.__args__)
    if not unknown:
        return
    literal.__args__ += unknown
    for name in unknown:
        torch_utils.STR_DTYPE_TO_TORCH_DTYPE[name] = torch.uint8
    rebuild_dataclass(CacheConfig, force=True)
    rebuild_dataclass(VllmConfig, force=True)


def _is_wide() -> bool:
    import vllm.config.cache as cache

    return {*names()} <= {*cache.CacheDType.__args__}  # type: ignore[attr-defined]


def register_dtypes(_: Hooks) -> None:
    import vllm.config.cache as cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.CUSTOM
    for name in names():
        if name not in cache.KV_CACHE_DTYPES:
            handler = type(
                f"Kvq_{name}",
                (),
                {"name": name, "torch_dtype": lambda self: torch.uint8, "quant_mode": lambda self: mode},
            )
            cache.register_kv_cache_dtype(name)(handler)


def _are_registered() -> bool:
    import vllm.config.cache as cache

    return {*names()} <= {*cache.KV_CACHE_DTYPES}


class _Choices(list[str]):
    """All are accepted, and those that no list for users names are not listed. An unknown name that is like a listed
    one is refused here, because argparse would name all of them."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in FORMATS or FORMATS[name].public)

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if close := meant(name, self):
            raise argparse.ArgumentError(None, f"--kv-cache-dtype: there is no format {name!r}; did you mean {close}?")
        return False


def hide_test_formats(hooks: Hooks) -> None:
    def make(add: Any) -> Any:
        @functools.wraps(add)
        def add_cli_args(parser: Any) -> Any:
            if problem := hooks.environment_problem():
                parser.error(str(problem))
            parser = add(parser)
            for action in parser._actions:
                if action.dest == "kv_cache_dtype" and action.choices is not None:
                    action.choices = _Choices(action.choices)
            return parser

        return add_cli_args

    once(ARGUMENTS, make)


WIDENED = Patch(
    what="CacheDType literal widened",
    why="0.32 has no way to add a KV cache dtype",
    until="vLLM 0.32 is no longer supported",
    needs=(
        "vllm.config.cache:CacheDType",
        "vllm.config:CacheConfig",
        "vllm.config:VllmConfig",
        "vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE",
    ),
    install=widen_literal,
    versions=("0.32",),
    active=_is_wide,
)
REGISTERED = Patch(
    what="register_kv_cache_dtype",
    why="the official way to add a KV cache dtype",
    until="never",
    needs=(
        "vllm.config.cache:KV_CACHE_DTYPES",
        "vllm.config.cache:register_kv_cache_dtype",
        "vllm.v1.kv_cache_interface:KVQuantMode",
    ),
    install=register_dtypes,
    versions=("0.33",),
    active=_are_registered,
)
HIDDEN = Patch(
    what="choices of --kv-cache-dtype replaced",
    why="test-only formats are accepted and not listed",
    until="a dtype may be registered as hidden",
    needs=(ARGUMENTS,),
    install=hide_test_formats,
    replaces=(ARGUMENTS,),
)
