"""Faults in what is said of formats that are slow."""

from __future__ import annotations

from proof.mutants.fault import Fault

SLOW = "tests/kernels/test_slow.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a slow half of a format is not said",
        "vllm_kvq/kernels/cpu/slow.py::_reasons",
        "in HALVES",
        "in HALVES[:1]",
        SLOW,
    ),
    Fault(
        "outliers by slab are not said to be slow",
        "vllm_kvq/kernels/cpu/slow.py::_reasons",
        '"slab"',
        '"slabs"',
        SLOW,
    ),
    Fault(
        "an option is blamed that does not matter",
        "vllm_kvq/kernels/cpu/slow.py::_reason",
        "*((name,) for name in changed), changed",
        "changed,",
        SLOW,
    ),
    Fault(
        "the option to blame is sought with other sinks than the user's",
        "vllm_kvq/kernels/blame.py::blamed",
        "if value is not None}\n    default",
        "if name == ''}\n    default",
        "tests/kernels/test_paths.py -k to_blame",
    ),
    Fault(
        "the head size is blamed for an option",
        "vllm_kvq/kernels/cpu/slow.py::_reason",
        "_fast(fmt, half, chosen | kept | others)",
        "not names",
        SLOW,
    ),
    Fault(
        "float32 values pass for integer ones",
        "csrc/cpu/attend/float32/table.h",
        "add, false",
        "add, true",
        SLOW,
        slow=True,
    ),
    Fault(
        "the path does not say what is slow",
        "vllm_kvq/kernels/paths.py::path_for",
        ", slow_on_cpu.slow(fmt)",
        "",
        SLOW,
    ),
    Fault(
        "the path does not say that a subspace is slow on a GPU",
        "vllm_kvq/kernels/paths.py::path_for",
        ", slow=slow_on_gpu.slow(fmt))",
        ")",
        "tests/kernels/test_paths.py -k slow_prompts",
    ),
    Fault(
        "the server does not say what is slow",
        "vllm_kvq/integration/worker/report.py::path_warnings",
        "return why + ([path.slow] if path.slow is not None else [])",
        "return why",
        "tests/planning/plan/test_served.py -k said_at_start",
    ),
    Fault(
        "a slow option is not timed",
        "vllm_kvq/bench/slow.py",
        '("innerq2", {"key_bits": 4}),',
        "",
        SLOW,
    ),
)
