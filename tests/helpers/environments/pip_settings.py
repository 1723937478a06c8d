"""pip behaves the same in tests on every machine: it sees neither its configuration files nor its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping


def without_the_machines(variables: Mapping[str, str]) -> dict[str, str]:
    """With these variables pip has no settings except its own defaults."""
    kept = {name: value for name, value in variables.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}  # the one value for which pip reads no file at all
