from __future__ import annotations

import pytest
from lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """Skips the rows of models that need a package which is not here."""
    call = getattr(request.node, "callspec", None)
    arch = call.params.get("arch") if call else None
    if arch is not None and arch.needs:
        # installed, but built for another torch: importing it raises something else
        pytest.importorskip(arch.needs, exc_type=Exception)
