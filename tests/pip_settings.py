"""pip in tests behaves alike on every machine: it sees neither its configuration files nor its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping


def without_the_machines(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables, with which pip has no settings but its own defaults."""
    kept = {name: value for name, value in variables.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}  # the one value for which pip reads no file at all
