"""Formats and the public API work where vllm is not installed."""

import subprocess
import sys

CODE = """
import importlib.abc, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "triton", "transformers"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Forbid())
import torch
import vllm_kvq
import vllm_kvq.cli.eval.error
import vllm_kvq.formats

assert not {"vllm", "triton", "transformers"} & {name.split(".")[0] for name in sys.modules}
x = torch.randn(40, 2, 64)
for name, fmt in ((n, f) for n, f in vllm_kvq.FORMATS.items() if not f.keys.calibrated):
    vllm_kvq.roundtrip(name, x, x, x)
    assert fmt.bits_per_element(64, 128) > (2 if name == "kvarn_k2v2" else 3)
print("fine")
"""


def test_import_and_use_without_vllm() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "fine"


def test_the_hook_would_notice() -> None:
    code = CODE.replace("import vllm_kvq\n", "import vllm\n")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode != 0
    assert "vllm must not be imported" in run.stderr
