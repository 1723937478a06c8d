"""How programs that a model wrote are shut in, for all tests of the sandbox."""

from __future__ import annotations

import pytest

from vllm_kvq.eval.humaneval import sandbox


@pytest.fixture(params=[True, False], ids=["namespaces", "guard"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    """Both ways, where this system allows the first."""
    if request.param and sandbox.run("").isolation != "namespaces":
        pytest.skip("this system lets us make no namespaces")
    return bool(request.param)
