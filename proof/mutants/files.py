"""Faults in what is kept on disk: compiled libraries, measurements, the answers of a batch job."""

from __future__ import annotations

from proof.mutants.fault import Fault

BUILD = "tests/kernels/test_cpu_build.py"
STORE = "tests/eval/test_store.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a truncated library counts as whole",
        "vllm_kvq/kernels/compiled.py",
        "return bool(length >= sections + size * count)",
        "return True",
        f"{BUILD} -k truncated",
    ),
    Fault(
        "a damaged library is not compiled again",
        "vllm_kvq/kernels/build.py",
        "            if compiled.is_there(target):\n                return target\n            if target",
        "            if target.exists():\n                return target\n            if target",
        f"{BUILD} -k damaged",
    ),
    Fault(
        "the compiler's last line is taken for the cause",
        "vllm_kvq/kernels/build.py",
        'if "error:" in line)',
        "if not line)",
        f"{BUILD} -k full_disk",
    ),
    Fault(
        "a damaged measurement is kept",
        "vllm_kvq/eval/run/store.py",
        "            path.unlink(missing_ok=True)\n            return None",
        "            return None",
        f"{STORE} -k damaged",
    ),
    Fault(
        "a truncated measurement counts as measured",
        "vllm_kvq/eval/run/store.py",
        "return zipfile.is_zipfile(self.path(kind, key))",
        "return self.path(kind, key).exists()",
        f"{STORE} -k truncated",
    ),
    Fault(
        "a full disk leaves half a measurement",
        "vllm_kvq/eval/run/store.py",
        "            os.unlink(made)\n",
        "",
        f"{STORE} -k full_disk",
    ),
    Fault(
        "a batch job keeps the line at which it was killed",
        "examples/batch.py",
        "os.truncate(path, sum(map(len, whole)))",
        "pass",
        "tests/engine/test_batch.py -k killed",
        slow=True,
    ),
)
