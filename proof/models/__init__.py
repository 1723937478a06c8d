"""Tiny random models of every architecture that is known, served or refused.

    architecture.py          the statements about one, and the numbers of small configurations
    served.py                those that work
    refused.py               those that are refused at start-up
    copies.py                of real models, with their tokenizers
    seeing.py                those that see images
    checkpoints.py           their random weights, LoRA adapters and tokenizers
    draft.py                 draft models for speculative decoding
    document.py              docs/models.md, printed from served.py and refused.py

`tests/models` proves these statements about each.
"""

from __future__ import annotations

from proof.models.architecture import Architecture
from proof.models.refused import REFUSED
from proof.models.served import SERVED

ARCHITECTURES: list[Architecture] = SERVED + REFUSED


def named(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)
