"""examples/kubernetes, read as a cluster would: the server's command line, the pod, and the fields that are set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "kubernetes"
Object = dict[str, Any]


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Example:
    """One file, as its chart or the cluster makes it a pod that serves."""

    command: list[str]
    pod: Object

    @property
    def container(self) -> Object:
        return next(c for c in self.pod["containers"] if c["name"] == "vllm")

    def port(self, name: str | int) -> int:
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        return name if isinstance(name, int) else ports[name]


def entry_point() -> list[str]:
    """Of the image that docker/Dockerfile.gpu makes."""
    lines = (ROOT / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("ENTRYPOINT ")]
    return json.loads(line.removeprefix("ENTRYPOINT "))


def deployment() -> Example:
    (found,) = [d for d in documents("deployment.yaml") if d["kind"] == "Deployment"]
    pod = found["spec"]["template"]["spec"]
    return Example([*entry_point(), *pod["containers"][0]["args"]], pod)


FLAGS = {
    "enablePrefixCaching": "enable-prefix-caching",
    "enableChunkedPrefill": "enable-chunked-prefill",
    "maxModelLen": "max-model-len",
    "tensorParallelSize": "tensor-parallel-size",
}
"""The chart's vllmConfig as flags of `vllm serve`."""


def production_stack() -> Example:
    (values,) = documents("production-stack.yaml")
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    command = ["vllm", "serve", model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
    for name, value in model["vllmConfig"].items():
        if name == "extraArgs":
            command += value
        elif isinstance(value, bool):
            command.append(f"--{'' if value else 'no-'}{FLAGS[name]}")
        else:
            command += [f"--{FLAGS[name]}", str(value)]
    first = dict(model["initContainer"])
    assert first.pop("mountPvcStorage") is False
    first["volumeMounts"] = first.pop("extraVolumeMounts")
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "env": model["env"],
        "ports": [{"name": "container-port", "containerPort": 8000}],
        "resources": {
            "requests": {"cpu": str(model["requestCPU"]), "memory": model["requestMemory"]},
            "limits": {"nvidia.com/gpu": str(model["requestGPU"])},
        },
        "volumeMounts": model["extraVolumeMounts"],
        "startupProbe": engine["startupProbe"],
    }
    pod = {
        "initContainers": [first],
        "containers": [container],
        "volumes": model["extraVolumes"],
        "securityContext": engine["securityContext"],
    }
    return Example(command, pod)


def llm_d() -> Example:
    (values,) = documents("llm-d.yaml")
    decode = values["decode"]
    (container,) = decode["containers"]
    container = dict(container)
    assert container.pop("modelCommand") == "vllmServe"
    assert container.pop("mountModelVolume")
    command = ["vllm", "serve", values["modelArtifacts"]["uri"].removeprefix("hf://")]
    command += ["--port", str(values["routing"]["servicePort"])]
    command += ["--served-model-name", values["modelArtifacts"]["name"], *container["args"]]
    container |= container.pop("extraConfig")
    pod = {name: decode[name] for name in ("initContainers", "volumes", "terminationGracePeriodSeconds")}
    return Example(command, pod | {"containers": [container]})


SERVERS = {"deployment.yaml": deployment, "production-stack.yaml": production_stack, "llm-d.yaml": llm_d}
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


KUBERNETES = {"env", "extraVolumes", "extraVolumeMounts", "volumeMounts", "volumes", "initContainers", "resources",
              "ports", "extraConfig", "securityContext", "template"}  # fmt: skip
"""Below these a chart takes what Kubernetes defines; the pod's schema says whether that is right."""


def fields(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that is set, as `a.b[].c`, with its value, down to what Kubernetes defines."""
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{at}.{name}" if at else name
            if name in KUBERNETES or not isinstance(inner, dict | list):
                yield path, inner
            else:
                yield from fields(inner, path)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for inner in value:
            yield from fields(inner, f"{at}[]")
    else:
        yield at, value
