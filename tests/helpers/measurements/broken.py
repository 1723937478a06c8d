"""Formats that store everything bit for bit, except for one mistake, which an evaluation has to notice.

Installed as another package's formats are. Their keys or values have names of their own, so the PyTorch kernels serve
them.
"""

from __future__ import annotations

from pathlib import Path

CODE = '''
import torch
from vllm_kvq.formats.methods.lossless import RawKeys
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.methods.values import RawValues
from vllm_kvq.kernels.torch.step import PlannedStep

HEADS = 2


class WholeKeys(RawKeys):
    name = "whole"


class ScaledKeys(RawKeys):
    """One head's keys doubled."""
    name = "scaled"

    def pack(self, x, state):
        doubled = x.clone()
        doubled[::HEADS] *= 2
        return super().pack(doubled, state)


class SwappedValues(RawValues):
    """The values of two neighbours in each 32 tokens swapped."""
    name = "swapped"

    def pack(self, x, state):
        swapped = x.clone()
        swapped[:, 4::32], swapped[:, 5::32] = x[:, 5::32], x[:, 4::32]
        return super().pack(swapped, state)


class LateKeys(RawKeys):
    name = "late"


update = PlannedStep.update


def late(self, *arguments):
    """The window of a chunk is read one token late."""
    ring, replaced = update(self, *arguments)
    return (torch.cat([ring[:1], ring[:-1]]) if self.fmt.name == "late" else ring), replaced


PlannedStep.update = late
FORMATS = (
    Format("whole", "right", WholeKeys, RawValues, {"W": 32}, public=False),
    Format("scaled", "one head's scale doubled", ScaledKeys, RawValues, {"W": 32}, public=False),
    Format("swapped", "values of two tokens swapped", RawKeys, SwappedValues, {"W": 32}, public=False),
    Format("late", "the window read one token late", LateKeys, RawValues, {"W": 32}, public=False),
)
'''


def install(folder: Path) -> None:
    """As pip installs a package there."""
    (folder / "broken_formats.py").write_text(CODE)
    info = folder / "broken_formats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_formats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_kvq.formats]\nbroken = broken_formats:FORMATS\n")
