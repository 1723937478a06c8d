"""Which path serves a format, why a faster one does not, and that codecs are recognized by their exact class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_kvq.formats import Geometry, PageFormat, get_format
from vllm_kvq.formats.codec import KeyCodec
from vllm_kvq.formats.methods.lossless import RawKeys
from vllm_kvq.formats.methods.squat import SQuatKeys
from vllm_kvq.formats.parts.fields import Packed
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.step import CPU, CPUStep
from vllm_kvq.kernels.gpu.step import kernels_of
from vllm_kvq.kernels.paths import Path, Wish, kernels_for, path_for, step_for
from vllm_kvq.kernels.slots import SlotGeometry
from vllm_kvq.kernels.step import Step
from vllm_kvq.kernels.torch.step import TORCH, PlannedStep

has_library = pytest.mark.skipif(library() is None, reason="no C++ compiler")
HERE = torch.device("cpu")


def bound(name: str, **options: Any) -> PageFormat:
    return get_format(name).bind(Geometry(64, 64, torch.bfloat16), options)


@pytest.mark.parametrize(
    ("name", "wish", "path", "why"),
    [
        pytest.param("squat2", Wish("cpu"), "C++", None, marks=has_library),
        ("squat2", Wish("cpu", "torch"), "PyTorch", "VLLM_KVQ_KERNELS=torch disables C++"),
        ("squat2", Wish("cuda"), "GPU/Triton", None),
        ("squat2", Wish("cpu", gpu_path=True), "GPU/Triton", None),
        ("kitty2", Wish("cuda"), "GPU/Triton", None),
        ("qjl3", Wish("cuda"), "GPU/CUDA", None),
        ("lossless", Wish("cuda"), "PyTorch", "has no Triton kernel for its keys or values"),
        pytest.param("lossless", Wish("cpu", gpu_path=True), "C++", "has no CUDA kernels", marks=has_library),
        ("squat2", Wish("xpu"), "PyTorch", None),
    ],
)
def test_path(name: str, wish: Wish, path: str, why: str | None) -> None:
    found = path_for(bound(name), wish)
    assert found.name == path
    assert found.on_gpu == path.startswith("GPU")
    assert found.why is None if why is None else why in str(found.why)
    if not found.on_gpu:
        assert kernels_for(bound(name), wish) is (CPU if path == "C++" else TORCH)


@pytest.mark.parametrize(
    ("name", "wish", "path", "why"),
    [
        ("squat2", Wish("cuda"), "GPU/Triton", None),
        ("qjl3", Wish("cuda"), "PyTorch", "the CUDA kernels for qjl3 don't support a soft cap of attention scores"),
        pytest.param("qjl3", Wish("cpu"), "C++", None, marks=has_library),
    ],
)
def test_a_soft_cap(name: str, wish: Wish, path: str, why: str | None) -> None:
    found = path_for(bound(name), wish, capped=True)
    assert found.name == path
    assert found.why is None if why is None else why in str(found.why)
    if name == "qjl3":
        slots = SlotGeometry.of(bound(name), 2, 0)
        with pytest.raises(ValueError, match="don't support a soft cap"):
            step_for(Path("GPU/CUDA"), bound(name), slots, 0, 0.125, HERE, cap=50.0)


@pytest.mark.parametrize(
    ("name", "options", "instead"),
    [
        ("squat2", {}, "use kitty2, which stores the same fields"),
        ("squat4", {}, "use kivi4, which stores the same fields"),
        ("squat2", {"value_bits": 4}, "--kv-cache-dtype auto may be faster"),
        ("kitty2", {}, None),
        ("klt3", {}, None),
        ("innerq2", {}, None),
        ("qjl3", {}, None),
    ],
)
def test_slow_prompts_on_a_gpu(name: str, options: dict[str, Any], instead: str | None) -> None:
    """InnerQ and QJL keep a state, too, but none of queries."""
    said = path_for(bound(name, **options), Wish("cuda")).slow
    assert said is None if instead is None else str(said).endswith(instead)


def test_large_heads() -> None:
    fmt = get_format("squat2").bind(Geometry(512, 64, torch.bfloat16))
    found = path_for(fmt, Wish("cuda"))
    assert found.name == "PyTorch"
    assert "the Triton kernels support head sizes up to 256, not 512" in str(found.why)
    assert library() is None or path_for(fmt, Wish("cpu")).name == "C++"


def test_the_environment_is_read_and_checked() -> None:
    assert Wish.of("cpu", {}) == Wish("cpu")
    assert Wish.of("cpu", {"VLLM_KVQ_KERNELS": "torch", "VLLM_KVQ_GPU_PATH": "1"}) == Wish("cpu", "torch", True)
    with pytest.raises(ValueError, match="VLLM_KVQ_KERNELS is 'cpp'; it is 'auto' or 'torch'"):
        Wish.of("cpu", {"VLLM_KVQ_KERNELS": "cpp"})


@pytest.mark.parametrize(
    ("name", "options", "device", "path", "why"),
    [
        ("qjl3", {"sketch": "gaussian"}, "cuda", "GPU/CUDA", None),  # other numbers in the same matrix
        ("qjl3", {"outliers": 0}, "cuda", "PyTorch", "leave these options out (they are 128, 0, 0)"),
        pytest.param("qjl3", {"outliers": 0}, "cpu", "C++", None, marks=has_library),
        ("polar3", {"angle_bits": 3}, "cuda", "PyTorch", "polar3 has no Triton kernel for its keys or values"),
        pytest.param("polar3", {"angle_bits": 3}, "cpu", "C++", None, marks=has_library),
        ("polar4_v16", {}, "cuda", "PyTorch", "polar4_v16 has no Triton kernel for its keys or values"),
        pytest.param("polar4_v16", {}, "cpu", "C++", None, marks=has_library),
    ],
)
def test_the_papers_other_settings(name: str, options: dict[str, Any], device: str, path: str, why: str | None) -> None:
    found = path_for(bound(name, **options), Wish(device))
    assert found.name == path
    assert found.why is None if why is None else why in str(found.why)


@pytest.mark.parametrize(
    ("options", "device", "path"),
    [
        pytest.param({"key_scales": "fitted", "value_scales": "fitted"}, "cpu", "C++", marks=has_library),
        ({"key_scales": "fitted"}, "cuda", "GPU/Triton"),
        ({"value_scales": "fitted"}, "cuda", "GPU/Triton"),
        ({"token_scale": "balanced"}, "cpu", "PyTorch"),
        ({"token_scale": "balanced"}, "cuda", "PyTorch"),
        pytest.param({"value_rotation": "hadamard"}, "cpu", "C++", marks=has_library),
        pytest.param({"value_rotation": "hadamard", "value_scales": "fitted"}, "cpu", "C++", marks=has_library),
        ({"value_rotation": "hadamard"}, "cuda", "GPU/Triton"),
    ],
)
@pytest.mark.parametrize("name", ["squat2", "kivi4"])
def test_an_option_that_kernels_do_not_know_is_not_ignored(
    name: str, options: dict[str, str], device: str, path: str
) -> None:
    found = path_for(get_format(name).bind(Geometry(64, 64, torch.bfloat16), options), Wish(device))
    assert found.name == path
    assert (found.why is None) == (path != "PyTorch")


@pytest.mark.parametrize(
    ("name", "options", "device", "path", "why"),
    [
        pytest.param("squat2", {"r": 40}, "cpu", "C++", "", marks=has_library),
        ("squat2", {"r": 40, "floor": 0}, "cuda", "PyTorch", "no Triton kernel for its keys or values with r=40;"),
        ("squat2", {"r": 40, "values": "raw"}, "cuda", "PyTorch", "no Triton kernel for its keys or values;"),
        pytest.param("innerq2", {"quant_mode": "symmetric", "key_norm": "none"}, "cpu", "C++", "", marks=has_library),
        ("innerq2", {"quant_mode": "symmetric", "key_norm": "none"}, "cuda", "GPU/Triton", ""),
        pytest.param(
            *("innerq2", {"quant_mode": "hybrid_prefill"}, "cpu", "PyTorch"),
            "no C++ kernels for its keys or values with quant_mode=hybrid_prefill",
            marks=has_library,
        ),
        ("innerq2", {"quant_mode": "hybrid_prefill"}, "cuda", "PyTorch", "values with quant_mode=hybrid_prefill;"),
        # its default of 128 sinks is more than a page here
        pytest.param(
            *("kvarn_k4v2", {"S": 5, "value_bits": 4}, "cpu", "PyTorch", "no C++ kernels for its keys or values"),
            marks=has_library,
        ),
    ],
)
def test_an_option_that_is_to_blame_is_named(
    name: str, options: dict[str, object], device: str, path: str, why: str
) -> None:
    found = path_for(get_format(name).bind(Geometry(64, 64), options), Wish(device))
    assert found.name == path
    assert why in str(found.why or "")


class OtherKeys(SQuatKeys):
    """A third party's codec: it may store what its parent does not."""


def test_a_subclass_is_served_by_pytorch_as_a_whole() -> None:
    """On every device, until a backend's table names it."""
    fmt = bound("squat2")
    other = replace(fmt, keys=OtherKeys(fmt.geometry, fmt.settings.of_codec(SQuatKeys)))
    assert kernels_of(fmt) is not None
    assert kernels_of(other) is None
    assert path_for(other, Wish("cuda")).name == path_for(other, Wish("cpu")).name == "PyTorch"


class ForeignKeys(KeyCodec):
    """A third party's codec, which no backend supports: `lossless` under another name."""

    def __init__(self, geometry: Geometry) -> None:
        self.raw = RawKeys(geometry, {})
        self.slab_fields = self.raw.slab_fields

    slab_fields = ()

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return self.raw.pack(x, state)

    def unpack(self, fields: Packed) -> torch.Tensor:
        return self.raw.unpack(fields)


@has_library
def test_a_codec_that_no_backend_knows_is_served_by_pytorch_as_a_whole() -> None:
    fmt = bound("lossless")
    foreign = replace(fmt, keys=ForeignKeys(fmt.geometry))
    path = path_for(foreign, Wish("cpu"))
    step = step_for(path, foreign, SlotGeometry.of(foreign, 2, 0), 0, 0.125, HERE)
    assert path == Path("PyTorch", "lossless has no C++ kernels for its keys or values")
    assert isinstance(step, PlannedStep)
    assert step.kernels is TORCH
    with pytest.raises(ValueError, match="no C\\+\\+ kernels"):
        CPUStep(foreign, SlotGeometry.of(foreign, 2, 0), 0, 0.125)


def test_steps() -> None:
    fmt = bound("squat2")
    slots = SlotGeometry.of(fmt, 2, 0)
    asked: list[bool] = []

    def prompts(merged: bool) -> None:
        asked.append(merged)

    def made(wish: Wish, scale: float = 0.125) -> Step:
        return step_for(path_for(fmt, wish), fmt, slots, 0, scale, HERE, prompts)

    assert isinstance(made(Wish("cpu", "torch")), PlannedStep)
    assert path_for(fmt, Wish("cpu", "torch")) == Path("PyTorch", "VLLM_KVQ_KERNELS=torch disables C++")
    if library() is not None:
        assert isinstance(made(Wish("cpu")), CPUStep)
    assert not any(asked)
    pytest.importorskip("triton")
    gpu = [made(Wish("cpu", gpu_path=True), scale) for scale in (0.5, 0.5, 0.25)]
    assert asked[-3:] == [True] * 3
    # one step, and with it one set of counters, for all equal layers
    assert gpu[0] is gpu[1] is not gpu[2]
