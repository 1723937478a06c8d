"""Which formats the GPU kernels attend, and which of them share a kernel: asked of the table of formats."""

from __future__ import annotations

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.table import suite

HEAD, PAGE = 128, 64


def bound(name: str) -> PageFormat:
    return get_format(name).bind(Geometry(HEAD, PAGE))


def by_triton() -> list[str]:
    """The formats that Triton's kernels pack and attend."""
    from vllm_kvq.kernels.gpu.triton.kernels import TRITON

    return [name for name in suite("public") if TRITON.why_not(bound(name)) is None]


def by_cuda() -> list[str]:
    """Those that CUDA's do."""
    from vllm_kvq.kernels.gpu.cuda import CUDA

    return [name for name in suite("public") if CUDA.why_not(bound(name)) is None]


def by_pytorch() -> list[str]:
    """Those that PyTorch computes on a GPU."""
    known = {*by_triton(), *by_cuda()}
    return [name for name in suite("public") if name not in known]


def shared() -> dict[str, list[str]]:
    """Each attention kernel's first format -> all formats that it attends: SQuat is attended as Kitty or KIVI."""
    from vllm_kvq.kernels.gpu.triton.layout import constants

    first: dict[object, str] = {}
    found: dict[str, list[str]] = {}
    triton, cuda = by_triton(), by_cuda()
    for name in suite("public"):
        if name in triton:
            kernel = first.setdefault(tuple(sorted((constants(bound(name)) or {}).items())), name)
            found.setdefault(kernel, []).append(name)
        elif name in cuda:
            found[name] = [name]
    return found


def one_per_state() -> list[str]:
    """The first Triton format of each kind of state that a prompt leaves."""
    from vllm_kvq.kernels.gpu.triton.layout import state_constants

    first: dict[object, str] = {}
    for name in by_triton():
        kept = state_constants(bound(name))
        first.setdefault((kept["NORM"], kept["ENERGY"], kept["RANK"] > 0), name)
    return list(first.values())


def most_sinks() -> str:
    """The Triton format with the most sinks."""
    return max(by_triton(), key=lambda name: bound(name).S)
