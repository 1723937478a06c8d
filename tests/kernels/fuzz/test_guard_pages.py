"""What the fuzz tests of this folder rely on: a call that leaves one of its tensors does not survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guard_pages import guarded

from vllm_kvq.kernels.cpu.library import library

HERE = Path(__file__).resolve()
LEAVES = """
import ctypes
import torch
from guard_pages import guarded
touch = guarded(lambda x, where: ctypes.{what}(x.data_ptr() + where, *{arguments}))
x = torch.zeros(3, 5)
touch(x, 0)
touch(x, 59)
print("still here", flush=True)
touch(x, {outside})
print("and now")
"""
ATTENDS = """
import numpy, torch
from guard_pages import guarded
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.kernels.cpu.call import scores, team
from vllm_kvq.kernels.cpu.layout import bind
from vllm_kvq.kernels.cpu.library import library
from vllm_kvq.kernels.cpu.tuples import Part
from vllm_kvq.kernels.torch.lists import PageList
fmt = get_format("kivi2").bind(Geometry(64, 32, torch.float16))
one = torch.ones(1, dtype=torch.int64)
def attend(pages, count):
    pretended = numpy.lib.stride_tricks.as_strided(pages.numpy(), (count, *pages.shape[1:]), pages.stride())
    lists = PageList((count - 1) * one, 0 * one, 0 * one, 32 * one)
    part = Part(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1))
    query = torch.ones(1, 1, 1, 64)
    library().attend_packed(bind(fmt), query, torch.from_numpy(pretended), lists, scores(1.0, 0.0), part, team(1, 0))
edge = guarded(attend)
page = torch.zeros(1, 1, fmt.record_bytes, dtype=torch.uint8)
edge(page, 1)
print("still here", flush=True)
edge(page, 2)
print("and now")
"""
"""The second of two pages isn't there."""


def killed(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parents[3]), str(HERE.parents[1])))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "still here\n", done.stderr[-2000:]
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(("what", "arguments"), [("string_at", (1,)), ("memset", (0, 1))], ids=["read", "written"])
@pytest.mark.parametrize("outside", [60, -1], ids=["behind the end", "before the beginning"])
def test_the_next_byte_may_not_be(what: str, arguments: tuple[int, ...], outside: int) -> None:
    killed(LEAVES.format(what=what, arguments=arguments, outside=outside))


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_page_that_is_not_there_may_not_be_read() -> None:
    killed(ATTENDS)


def test_what_a_call_writes_is_written() -> None:
    """Into views that share memory, and into those with gaps, too."""
    both, gaps = torch.zeros(4, 2), torch.zeros(5, 7)

    def write(pair: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, empty: torch.Tensor) -> int:
        pair[0].fill_(1)
        pair[1].fill_(2)
        x.fill_(3)
        return empty.numel()

    assert guarded(write)((both[:, 0], both[:, 1]), gaps[1:3, ::2], gaps[:0]) == 0
    assert both.tolist() == 4 * [[1, 2]]
    assert gaps.tolist() == [7 * [0], *2 * [[3, 0, 3, 0, 3, 0, 3]], *2 * [7 * [0]]]
