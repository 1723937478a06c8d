"""Plots of a command, where they can be drawn: without matplotlib a command says so and writes everything else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence

from vllm_kvq.drawing import Picture

NO_PLOT = "There is no plot: it needs matplotlib (pip install 'vllm-kvq[bench]')."
IF_INSTALLED = "if matplotlib is installed"
"""The end of what the help says about a plot."""
Drawn = Sequence[Picture] | None
"""None: plots can't be drawn here."""


def pictures(draw: Callable[[], Sequence[Picture]]) -> Drawn:
    """What is drawn, or a sentence on standard error."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: pip install 'vllm-kvq[bench]' for matplotlib", file=sys.stderr)
        return None
    return draw()
