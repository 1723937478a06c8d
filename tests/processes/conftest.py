from __future__ import annotations

from collections.abc import Iterator

import pytest
from farm import Farm
from ray_cluster import cluster

__all__ = ["cluster"]


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(tmp_path_factory.mktemp("processes"))
    yield farm
    farm.close()
