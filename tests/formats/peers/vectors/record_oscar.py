"""Record what OSCAR's own code makes of queries, keys and values, from a checkout of its authors' repository
(github.com/FutureMLS-Lab/OSCAR, commit 473ff3f):

    TRITON_INTERPRET=1 .venv/bin/python tests/formats/peers/vectors/record_oscar.py CHECKOUT

writes `oscar.safetensors` next to this file: rotations from `rotation/compute_kv_rotation.py` (methods qqt and sst,
composition r_h_pbr), and codes, scales and zeros from the kernel that fills the server's cache, under Triton's
interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ROTATION = "rotation/compute_kv_rotation.py"
KERNEL = "sglang-research/python/sglang/QuantKernel/oscar_rotation_clip_int2_kv.py"
D, HEADS, GROUP, TOKENS = 64, 2, 2, 128
PACKED = 32
CLIP = {"k": 0.96, "v": 0.92}


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def kernels(checkout: Path) -> Any:
    # all that the kernels' file wants of the server are two functions of its own, which are not called here
    stand_in = ModuleType("sglang.srt.mem_cache.kv_quant_kernels")
    stand_in._get_num_scale_groups = stand_in._is_power_of_two = lambda *_: True  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[name] = ModuleType(name)
    sys.modules["sglang.srt.mem_cache.kv_quant_kernels"] = stand_in
    return module(checkout / KERNEL)


def main() -> int:
    checkout = Path(sys.argv[1])
    fit, pack = module(checkout / ROTATION), kernels(checkout)
    generator = torch.Generator().manual_seed(11)
    mixing = torch.randn(3, HEADS, D, D, generator=generator) * torch.logspace(0.3, -1.2, D)[:, None]
    x = torch.randn(3, TOKENS, HEADS * GROUP, D, generator=generator)
    q = torch.einsum("thd,hde->the", x[0], mixing[0].repeat_interleave(GROUP, 0))
    k, v = (torch.einsum("thd,hde->the", x[i, :, :HEADS], mixing[i]) for i in (1, 2))
    found = {name: y.half().contiguous() for name, y in (("q", q), ("k", k), ("v", v))}
    with tempfile.TemporaryDirectory() as folder:
        for name, y in found.items():
            Path(folder, name).mkdir()
            torch.save(y, Path(folder, name, "1.pt"))
        for half, covariance in (("k", fit.compute_qqt), ("v", fit.compute_sst)):
            vectors, values = covariance(Path(folder), 1, D)
            rotation = fit.compose_rotation(vectors, values, fit.build_hadamard(D), "r_h_pbr").float()
            rows = found[half][:PACKED].float() @ rotation
            cache = torch.zeros(PACKED, HEADS, D // 4, dtype=torch.uint8)
            numbers = torch.zeros(PACKED, HEADS, 2)
            pack._pretransformed_int2_set_kv_clip_single_kernel[(PACKED // 4, HEADS)](
                rows, torch.arange(PACKED), cache, numbers, PACKED, HEADS,
                *rows.stride(), *cache.stride(), *numbers.stride(),
                HP_OFFSET=-1, HEAD_DIM=D, BLOCK_QUARTER=D // 4, BLOCK_TOK=4,
                CLIP_INDEX=pack._clip_index(CLIP[half], D), LLOYD_MAX=False,
            )  # fmt: skip
            # a byte holds the codes of four channels that lie a quarter of the head apart
            codes = torch.stack([cache >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
            found[f"{half}.rotation"] = rotation
            found[f"{half}.codes"] = codes.contiguous()
            found[f"{half}.scale"], found[f"{half}.zero"] = (x.contiguous() for x in numbers.unbind(-1))
    save_file(found, HERE / "oscar.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
