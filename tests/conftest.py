"""The same hypothesis examples in every run: a failure in CI is a failure everywhere."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pip_settings

# Several test processes share the cores: a thread that waits for another must not keep one busy. OpenMP reads this
# when it is loaded, that is, with torch, which nothing has imported yet.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What vLLM knows of its models' classes, which takes another process ten seconds to find out. Tests that have a cache
# folder of their own share it.
os.environ.setdefault("VLLM_CACHE_ROOT", os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/vllm")
# For this process's children: see COLLECTOR in scripts/bootstrap.py.
os.environ["KVQ_TESTS"] = "1"

import pytest
from hypothesis import HealthCheck, settings
from models_on_disk import model, written

from proof.weights.folder import folder, missing

__all__ = ["model", "written"]

alike = pip_settings.without_the_machines(os.environ)
for name in set(os.environ) - set(alike):
    del os.environ[name]
os.environ.update(alike)

settings.register_profile(
    "kvq",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvq")


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Commands silence vLLM in their own process and its children; here that would be the tests' process."""
    names = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture
def weights() -> Callable[[str], Path]:
    """A real pretrained model's checkpoint, by name; if it is missing, the test is skipped and says how to get it.

    Tests that use it are marked `weights`.
    """

    def found(name: str) -> Path:
        if sentence := missing(name):
            pytest.skip(sentence)
        return folder() / name

    return found


LONGEST = (
    "engine/test_v2.py",
    "triton/test_reference_triton.py",
    "triton/test_step.py",
    "eval/run/test_evaluation.py",
    "engine/fuzz/test_fuzz.py",
    "processes/test_processes.py",
    "processes/test_ray_batch.py",
    "eval/test_served_constants.py",
    "engine/oracle/test_lossless.py",
    "models/kinds/test_hits.py",
    "servers/test_metrics.py",
    "engine/worker/test_calibration.py",
    "triton/test_attend.py",
)
"""The modules that took longest. They start first (`--no-loadscope-reorder`), so that none is left as the last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next(
            (i for i, name in enumerate(LONGEST) if item.path.as_posix().endswith(f"tests/{name}")), len(LONGEST)
        )

    items.sort(key=place)
