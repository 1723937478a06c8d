"""Records what vLLM's own kernels make of keys and values, under Triton's interpreter, on any machine:

    TRITON_INTERPRET=1 .venv/bin/python tests/formats/peers/vectors/record_vllm.py

writes `turboquant.safetensors` and `int4_per_token_head.safetensors` next to this file. vLLM's store kernel writes keys
and values into its cache, and its own kernel or function for reading a whole cache reads them back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from safetensors.torch import save_file

# vLLM leaves Triton out where there is no GPU; the interpreter needs none
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl

HERE = Path(__file__).parent
TOKENS, BLOCK = 32, 16
SIZES = (64, 128)


def inputs(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, 1, d) that float16 holds: channels and tokens of unequal size, an outlier channel, a mean."""
    x = torch.randn(2, TOKENS, 1, d, generator=torch.Generator().manual_seed(d))
    x = x * torch.logspace(-0.5, 0.5, d) * torch.logspace(-0.3, 0.3, TOKENS)[:, None, None] - 0.3
    x[:, :, :, 5] += 8
    key, value = x.half()
    return key, value


def turboquant() -> dict[str, torch.Tensor]:
    from vllm.model_executor.layers.quantization.turboquant import TurboQuantConfig
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
    from vllm.v1.attention.ops import triton_turboquant_decode as decode
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    found = {}
    for d in SIZES:
        key, value = inputs(d)
        found |= {f"{d}.key": key, f"{d}.value": value}
        for bits in (3, 4):
            config = TurboQuantConfig.from_cache_dtype(f"turboquant_{bits}bit_nc", d)
            rotation, levels = _build_hadamard(d, "cpu"), get_centroids(d, bits)
            cache = torch.zeros(TOKENS // BLOCK, BLOCK, 1, config.slot_size_aligned, dtype=torch.uint8)
            triton_turboquant_store(
                key, value, cache, torch.arange(TOKENS, dtype=torch.int32), rotation, (levels[1:] + levels[:-1]) / 2,
                bits, config.key_packed_size, bits,
            )  # fmt: skip
            k, v = (torch.zeros(1, 1, TOKENS, d, dtype=torch.float16) for _ in range(2))
            layout = decode._get_layout(d, bits, bits, config.key_packed_size)
            table = torch.arange(TOKENS // BLOCK, dtype=torch.int32)[None]
            decode._tq_full_dequant_kv[(TOKENS, 1)](
                cache, table, levels, k, v,
                *k.stride()[:3], *v.stride()[:3], *cache.stride()[:3], table.stride(0),
                HEAD_DIM=d, BLOCK_SIZE=BLOCK, NUM_KV_HEADS=1, MSE_BYTES=layout["mse_bytes"],
                KPS=config.key_packed_size, VQB=bits, VAL_DATA_BYTES=layout["val_data_bytes"], MSE_BITS=bits,
                KEY_FP8=0, BLOCK_D=layout["BLOCK_D"], NORM_CORRECTION=int(config.norm_correction),
            )  # fmt: skip
            found |= {f"{d}.{bits}.levels": levels, f"{d}.{bits}.rotated_key": k[0, 0], f"{d}.{bits}.value": v[0, 0]}
    return found


def int4() -> dict[str, torch.Tensor]:
    from vllm.v1.attention.ops import int4_per_token_head as ops

    found = {}
    for d in SIZES:
        halves = {"key": inputs(d)[0], "value": inputs(d)[1]}
        # in float32: vLLM's rotation rounds to the dtype that it is given
        rotated = {name: ops.single_rht(x.float()) for name, x in halves.items()}
        caches = {name: torch.zeros(TOKENS // BLOCK, BLOCK, 1, d // 2, dtype=torch.uint8) for name in halves}
        scales = {name: torch.zeros(TOKENS // BLOCK, BLOCK, 1) for name in halves}
        ops._run_reshape_kernel(
            ops._reshape_cache_int4_kernel,
            **rotated,
            **{f"{name}_cache": cache for name, cache in caches.items()},
            k_scale_cache=scales["key"],
            v_scale_cache=scales["value"],
            slot_mapping=torch.arange(TOKENS),
            packing_factor=2,
        )
        for name, x in halves.items():
            bytes_ = caches[name].flatten(0, 1)[:, 0].int()
            codes = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).to(torch.uint8)
            found |= {f"{d}.{name}": x, f"{d}.{name}_codes": codes, f"{d}.{name}_scale": scales[name].flatten()}
    return found


def main() -> int:
    save_file(int4(), HERE / "int4_per_token_head.safetensors")
    save_file(turboquant(), HERE / "turboquant.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
