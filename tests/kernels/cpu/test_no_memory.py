"""A thread that gets no memory for its work: the call raises, and the next call works as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvq.kernels.cpu.library import library

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATH = (ROOT, HERE, HERE.parent)

# glibc's own, except that large pieces are refused once a test says so. Nothing but the kernels asks for such pieces by
# this name.
ALLOCATOR = """
#include <malloc.h>
#include <stddef.h>
size_t refused_from = (size_t)-1;
void* aligned_alloc(size_t alignment, size_t bytes) { return bytes < refused_from ? memalign(alignment, bytes) : NULL; }
"""

SCRIPT = """
import ctypes
import pytest
import torch
from test_cpu_attend import packed_pages
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.cpu import attend as cpu
from vllm_kvq.kernels.torch import attend
from vllm_kvq.kernels.torch.lists import PageList

refused_from = ctypes.c_size_t.in_dll(ctypes.CDLL(None), "refused_from")
fmt = get_format("squat2").bind(Geometry(64, 64, torch.float32))
one = torch.ones(64, dtype=torch.int64)
query = torch.randn(32, 64, 4, 64, generator=torch.Generator().manual_seed(0))
listed = PageList(torch.arange(1, 65), torch.arange(64) // 2, 0 * one, 64 * one)
arguments = fmt, query, packed_pages(fmt, 64, 2), listed, 0.125
want = attend.attend_packed(*arguments)

def refused():
    refused_from.value = 1 << 12
    try:
        with pytest.raises(Exception, match="bad_alloc"):
            cpu.attend_packed(*arguments)
    finally:
        refused_from.value = 1 << 60

def right():
    for got, exact in zip(cpu.attend_packed(*arguments), want, strict=True):
        assert (got - exact).norm() <= 1e-3 * exact.norm()

torch.set_num_threads(2)
refused()
refused()
torch.set_num_threads(1)
right()
# now the calling thread has its memory, and the other one fails: as soon as it is given work at all
torch.set_num_threads(2)
for attempt in range(1000):
    try:
        refused()
        break
    except pytest.fail.Exception:
        assert attempt < 999
right()
"""


@pytest.mark.skipif(shutil.which("cc") is None or library() is None, reason="no C++ compiler")
def test_a_call_without_memory(tmp_path: Path) -> None:
    source, allocator = tmp_path / "allocator.c", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", allocator, source], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATH)), "LD_PRELOAD": str(allocator)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
