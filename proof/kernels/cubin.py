"""One kernel of csrc/cuda by itself, as nvcc compiles it: to read its instructions, and to run them."""

from __future__ import annotations

from pathlib import Path

from vllm_kvq.kernels.build import BuildError, source_dir
from vllm_kvq.kernels.gpu.build import FLAGS, nvcc, run_compiler


def one_kernel(architecture: int, head_size: int, part: int, directory: Path, kind: str = "cubin") -> Path:
    """A single kernel (csrc/cuda/cubin.cu) for inspection: its cubin or its ptx."""
    compiler = nvcc()
    if compiler is None:
        raise BuildError("inspecting the CUDA kernels needs nvcc")
    command = [compiler, *FLAGS[:2], f"-arch=sm_{architecture}", f"-DKVQ_D={head_size}", f"-DKVQ_PART={part}"]
    target = directory / f"qjl-{part}-d{head_size}-sm{architecture}.{kind}"
    return run_compiler([*command, f"-{kind}", str(source_dir("cuda") / "cubin.cu")], target)
