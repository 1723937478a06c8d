"""Every kind of configuration that is served, and what it must lead to."""

from __future__ import annotations

from typing import Any

from engine_arguments import kvq

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (
        {"kv_cache_dtype": "squat2"},
        "128 True [] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=50176 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=42666 bf16_tokens=24500 ratio=1.74 (requests of 256 tokens)",
    ),
    "no sinks": (
        {"kv_cache_dtype": "squat2", **kvq(S=0)},
        "128 True [] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=0 sidecar_bytes=37632 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=51200 bf16_tokens=24500 ratio=2.09 (requests of 256 tokens)",
    ),
    "sinks": (
        {"kv_cache_dtype": "innerq2", "block_size": 64, "max_model_len": 1024},
        "64 True [] True None",
        "kvq: format=innerq2 bits=3.750 N=64 W=96 S=32 sidecar_bytes=92160 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=36571 bf16_tokens=15000 ratio=2.44 (requests of 1024 tokens)",
    ),
    "option N": (
        {"kv_cache_dtype": "qjl3", **kvq(N=64, W=64)},
        "64 True [] True None",
        "kvq: format=qjl3 bits=3.500 N=64 W=64 S=4 sidecar_bytes=64512 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=19692 bf16_tokens=14000 ratio=1.41 (requests of 256 tokens)",
    ),
    "a skipped layer": (
        {"kv_cache_dtype": "squat2", **kvq(skip_layers=[1])},
        "128 True ['1'] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=50176 (per request and layer) not_packed=1 "
        "path=C++ capacity_tokens=42666 bf16_tokens=76250 ratio=0.56 (requests of 256 tokens)",
    ),
    "vLLM's flag, two ranks": (
        {"kv_cache_dtype": "squat2", "kv_cache_dtype_skip_layers": ["1"], "tensor_parallel_size": 2},
        "128 True ['1'] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=25088 (per request and layer) not_packed=1 "
        "path=C++ capacity_tokens=42666 bf16_tokens=76250 ratio=0.56 (requests of 256 tokens)",
    ),
    "ngram": (
        {"kv_cache_dtype": "squat2", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        "128 True [] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=62720 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=36571 bf16_tokens=24500 ratio=1.49 (requests of 256 tokens)",
    ),
    "a draft model": (
        {"kv_cache_dtype": "lossless", "block_size": 32, "draft": "draft_model", **kvq(W=32, S=4)},
        "32 True [] True auto",
        "kvq: format=lossless bits=16.250 N=32 W=32 S=4 sidecar_bytes=66560 (per request and layer) "
        "not_packed=draft path=C++ capacity_tokens=21333 bf16_tokens=32250 ratio=0.66 (requests of 256 tokens)",
    ),
    "a draft with a skipped layer": (
        {"kv_cache_dtype": "squat2", "draft": "eagle3", **kvq(skip_layers=[0])},
        "128 True ['0'] True auto",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=62720 (per request and layer) "
        "not_packed=0,draft path=C++ capacity_tokens=36571 bf16_tokens=93500 ratio=0.39 (requests of 256 tokens)",
    ),
    "by layer": (
        {"kv_cache_dtype": "qjl3", **kvq(m={"0": 512, "*": 128})},
        "128 True [] True None",
        "kvq: format=qjl3 bits=4.938 N=128 W=128 S=4 sidecar_bytes=141568 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=28444 bf16_tokens=39500 ratio=0.72 (requests of 256 tokens)",
    ),
    "windows": (
        {"kv_cache_dtype": "squat2", "max_model_len": 512, "model": "Gemma-3"},
        "128 True ['sliding_window'] True None",
        "kvq: format=squat2 bits=3.062 N=128 W=32 S=4 sidecar_bytes=87808 (per request and layer) "
        "not_packed=sliding_window path=C++ capacity_tokens=18294 bf16_tokens=41994 ratio=0.44 "
        "(requests of 512 tokens)",
    ),
    "a hybrid": (
        {"kv_cache_dtype": "squat2", "max_model_len": 512, "model": "Granite 4"},
        "256 True [] True None",
        "kvq: format=squat2 bits=3.031 N=256 W=32 S=4 sidecar_bytes=99328 (per request and layer) not_packed=none "
        "path=C++ capacity_tokens=56661 bf16_tokens=39430 ratio=1.44 (requests of 512 tokens)",
    ),
}
"""What is configured; what vLLM's configuration then says (see `told`); the start-up line for 1000 blocks."""
