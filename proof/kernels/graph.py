"""A substitute for a CUDA graph, on CPU tensors: what a step has the device do is recorded once, and repeated without
the step's own code.

Recorded are Triton's launches (kernel, grid, tensors, scalars), calls of the emulated CUDA library, and PyTorch's own
operations. A replay finds new lengths, tables, headers and tokens in the same buffers. What was allocated meanwhile
belongs to the graph, as a graph's own pool does, and is poisoned before each replay: other graphs use that pool, too.

A graph can't be made of

    a read        the host looks at a value of the device's: `item`, `tolist`, a truth value, a shape that depends on it
    a moving      pointer: memory that is neither one of the buffers that stay nor the graph's own
    a copy        of values that the host makes up while it captures

`Recording.problems` names each. Tensors that the step may read on the host are declared; all others are the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("tolist", "numpy", "cpu", "__array__")
"""Methods of a tensor that wait for the device but are not an operation of PyTorch's on a CPU."""
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
"""Operations that wait; `item`, `int` and truth values end up in the first one."""
COPIES = ("lift_fresh", "lift_fresh_copy")
"""The last operation of `torch.tensor` and `torch.as_tensor`."""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@dataclass
class Recording:
    """The result of `record`."""

    work: list[Callable[[], Any]] = field(default_factory=list)
    own: list[torch.Tensor] = field(default_factory=list)
    """The memory allocated meanwhile."""
    problems: list[str] = field(default_factory=list)
    launches: int = 0

    def replay(self) -> None:
        if self.problems:
            raise RuntimeError(f"no graph can be made of this: {self.problems[0]}")
        for x in self.own:
            x.untyped_storage().fill_(0xFF)
        for again in self.work:
            again()


def record(step: Callable[[], Any], stay: Iterable[torch.Tensor], host: Iterable[torch.Tensor] = ()) -> Recording:
    """`step()` runs once, as it does while a graph is captured. `stay`: buffers that keep their place as long as the
    graph lives; `host`: tensors that are the host's own."""
    recorder = _Recorder({_memory(x) for x in stay}, list(host))
    with ExitStack() as stack:
        for patch in recorder.patches():
            stack.enter_context(patch)
        stack.enter_context(_Methods(recorder))
        stack.enter_context(_Operations(recorder))
        step()
    return recorder.recording


class _Recorder:
    def __init__(self, stay: set[int], host: list[torch.Tensor]) -> None:
        self.recording, self.inside = Recording(), False
        self.known = stay
        self.host = {_memory(x): x for x in host}
        """By the address of its memory; the tensors are kept alive so their memory is not reused."""

    def patches(self) -> list[Any]:
        from triton.runtime.interpreter import InterpretedFunction

        from vllm_kvq.kernels.gpu import cuda

        run, library = InterpretedFunction.run, cuda.library

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return self.work(kernel.fn.__name__, run, kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return [
            mock.patch.object(InterpretedFunction, "run", launch),
            mock.patch.object(cuda, "library", lambda device: _Library(self, library(device))),
        ]

    def work(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A launch: done now, and again by every replay."""
        self.take(name, _tensors((args, kwargs)))

        def again() -> Any:
            return function(*args, **kwargs)

        self.recording.work.append(again)
        self.recording.launches += 1
        # what a kernel does inside is the device's business
        before, self.inside = self.inside, True
        try:
            return again()
        finally:
            self.inside = before

    def take(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        for x in tensors:
            if _memory(x) not in self.known and _memory(x) not in self.host:
                self.recording.problems.append(f"{name} takes a tensor {tuple(x.shape)} that may move")

    def on_host(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(tensors) and all(_memory(x) in self.host for x in tensors)

    def read(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if tensors and not self.on_host(tensors):
            self.recording.problems.append(f"the host reads a tensor {tuple(tensors[0].shape)} of the device's: {what}")

    def operation(self, operator: Any, args: Any, kwargs: Any) -> Any:
        name, inputs = operator.overloadpacket.__name__, _tensors((args, kwargs))
        result = operator(*args, **kwargs)
        outputs = _tensors(result)
        if name in WAITS:
            self.read(name, inputs)
        if name in COPIES:
            self.recording.problems.append(f"a tensor {tuple(inputs[0].shape)} of the host's is copied to the device")
        if self.on_host(inputs):
            self.host |= {_memory(x): x for x in outputs}
            return result
        if name in ("index", "index_put_") and any(x.dtype == torch.bool for x in inputs[1:]):
            self.read("how many a mask takes", inputs)
        # neither a view nor written in place
        new = [x for x in outputs if _memory(x) not in {_memory(i) for i in inputs}]
        self.known |= {_memory(x) for x in new}
        self.recording.own += new
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments)
        if writes or (new and inputs):
            self.take(name, inputs)
        if writes:
            self.recording.work.append(lambda: operator(*args, **kwargs))
        elif new and "empty" not in name:
            self.recording.work.append(lambda: self._again(operator, args, kwargs, new))
        return result

    @staticmethod
    def _again(operator: Any, args: Any, kwargs: Any, into: list[torch.Tensor]) -> None:
        for old, fresh in zip(into, _tensors(operator(*args, **kwargs)), strict=True):
            old.copy_(fresh)


class _Library:
    """The emulated CUDA library; its functions launch kernels."""

    def __init__(self, recorder: _Recorder, library: Any) -> None:
        self.recorder, self.library = recorder, library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.library, name)
        return lambda *args: self.recorder.work(name, function, *args)


class _Methods(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if not self.recorder.inside and name in READS and isinstance(args[0], torch.Tensor):
            self.recorder.read(name, [args[0]])
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.inside:
            return operator(*args, **(kwargs or {}))
        return self.recorder.operation(operator, args, kwargs or {})
