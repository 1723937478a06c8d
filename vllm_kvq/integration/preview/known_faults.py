"""Faults of vLLM itself that users meet and that this plugin does not fix: for `vllm-kvq doctor`, docs and tests."""

from __future__ import annotations

from dataclasses import dataclass

CPU, ANY = "CPU", "any"


@dataclass(frozen=True)
class KnownFault:
    name: str
    """For programs and links: lowercase letters and dashes."""
    platform: str
    versions: tuple[str, ...]
    """Releases of vLLM that have been seen to have it, as in 0.32."""
    what: str
    instead: str
    """What to do."""

    def __post_init__(self) -> None:
        if self.platform not in (CPU, ANY) or not all(part.isdigit() for v in self.versions for part in v.split(".")):
            raise ValueError(f"the known fault {self.name!r} has no such platform or version")


KNOWN_FAULTS = (
    KnownFault(
        "sampling-with-drafts",
        CPU,
        ("0.32", "0.33"),
        "with --speculative-config, once a request of a batch samples, wrong tokens take the place of rejected drafts",
        "serve only greedy requests, or leave --speculative-config out",
    ),
    KnownFault(
        "slow-stop",
        ANY,
        ("0.32",),
        "after SIGTERM the API process keeps running while clients hold streams open, although nothing serves them",
        "start with --shutdown-timeout 20, so that requests finish, and send SIGKILL afterwards",
    ),
    KnownFault(
        "eager-pipeline",
        CPU,
        ("0.32",),
        "--pipeline-parallel-size with --enforce-eager crashes at the first request",
        "leave --enforce-eager out",
    ),
)


def faults_of(version: str, on_cpu: bool) -> list[KnownFault]:
    """Those of this release of vLLM, on a platform."""
    release = ".".join(version.split(".")[:2])
    return [f for f in KNOWN_FAULTS if release in f.versions and (on_cpu or f.platform == ANY)]
