"""What `quicken` changes of Triton's interpreter is only how long it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from vllm_kvq.kernels.gpu.loading import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton compiles its kernels here")

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def one_more(numbers: Any) -> Any:
        return tl.where(numbers < 0, numbers, numbers + 1)

    @triton.jit
    def add(pointer: Any, times: tl.constexpr) -> None:
        numbers = tl.load(pointer + tl.arange(0, 4))
        for _ in tl.static_range(times):
            numbers = one_more(numbers)
        tl.store(pointer + tl.arange(0, 4), numbers)


def test_functions_are_replaced_once_per_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[Any] = []
    own = interpreter._patch_builtin

    def watched(package: Any, *more: Any) -> None:
        replaced.append(package)
        own(package, *more)

    monkeypatch.setattr(interpreter, "_patch_builtin", watched)
    counts = []
    for times in (1, 5, 1):
        replaced.clear()
        numbers = torch.zeros(4)
        add[(2,)](numbers, times)
        assert numbers.tolist() == [2 * times] * 4
        counts.append(len(replaced))
    assert counts == [counts[0]] * 3
    assert 0 < replaced.count(tl) == 1


def test_they_are_tritons_own_again_behind_it() -> None:
    before = tl.load
    add[(1,)](torch.zeros(4), 1)
    assert tl.load is before
    assert tl.core.is_builtin(tl.load)
