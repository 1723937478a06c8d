"""examples/kubernetes, read as a cluster would: the server's command line and the pod."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "kubernetes"
CHARTS = ROOT / "tests" / "shipping" / "charts"
Object = dict[str, Any]


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Example:
    """One file, as the pod that serves, which its chart or the cluster makes of it."""

    command: list[str]
    pod: Object

    @property
    def container(self) -> Object:
        return next(c for c in self.pod["containers"] if c["name"] == "vllm")

    def port(self, name: str | int) -> int:
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        return name if isinstance(name, int) else ports[name]


def entry_point() -> list[str]:
    """The entry point of the image that docker/Dockerfile.gpu makes."""
    lines = (ROOT / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("ENTRYPOINT ")]
    return json.loads(line.removeprefix("ENTRYPOINT "))


def deployment() -> Example:
    (found,) = [d for d in documents("deployment.yaml") if d["kind"] == "Deployment"]
    pod = found["spec"]["template"]["spec"]
    return Example([*entry_point(), *pod["containers"][0]["args"]], pod)


def chart(name: str) -> Object:
    """What scripts/charts.py keeps of the chart that takes this file, and of what Helm makes of it."""
    return yaml.safe_load((CHARTS / name).read_text(encoding="utf-8"))


def rendered(name: str) -> Example:
    """The pod that serves, from a file of values."""
    pods = [d["spec"]["template"]["spec"] for d in chart(name)["rendered"] if d["kind"] == "Deployment"]
    (pod,) = [pod for pod in pods if any(c["name"] == "vllm" for c in pod["containers"])]
    container = Example([], pod).container
    return Example([*container["command"], *container.get("args", ())], pod)


CHARTED = ("production-stack.yaml", "llm-d.yaml")
SERVERS = {"deployment.yaml": deployment, **{name: partial(rendered, name) for name in CHARTED}}
"""The files that start `vllm serve`, and how."""


def ray_config() -> Object:
    """What the RayService hands to Ray's application for one model."""
    (service,) = documents("rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (config,) = application["args"]["llm_configs"]
    return config


def ray_pods() -> list[Object]:
    (service,) = documents("rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]
