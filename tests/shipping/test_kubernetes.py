"""examples/kubernetes, as far as it can be tested without a cluster."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_examples as examples
import kubernetes_validate
import pytest
from kubernetes_examples import SERVERS
from serve_arguments import parse_serve

from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED

MODEL = "Qwen/Qwen3-8B"
VERSION = "1.34"
"""The version of Kubernetes."""
FILES = sorted(path.name for path in examples.FOLDER.glob("*.yaml"))
CHARTS = sorted(path.name for path in examples.CHARTS.glob("*.yaml"))
specification = importlib.util.spec_from_file_location("charts", examples.ROOT / "scripts" / "charts.py")
assert specification is not None
assert specification.loader is not None
charts = sys.modules["charts"] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(charts)


@pytest.mark.parametrize("name", SERVERS)
def test_vllm_and_the_plugin_take_the_arguments(name: str, tmp_path: Path) -> None:
    command = SERVERS[name]().command
    parsed = parse_serve(command)
    assert (parsed.port, parsed.enable_prefix_caching) in {(8000, True), (8000, None)}
    assert parsed.kv_cache_dtype == RECOMMENDED
    assert parsed.max_model_len
    assert planned(command, tmp_path) == BUDGETS[RECOMMENDED].formats[0]


def planned(command: list[str], folder: Path) -> str:
    """The format that would serve a model of this shape, as `vllm-kvq check` finds out."""
    from transformers import Qwen3Config

    from vllm_kvq.integration.preview.dry_start import dry_start, without_kernels

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], num_hidden_layers=4, max_position_embeddings=40960, dtype="bfloat16"
    ).save_pretrained(folder)
    with without_kernels():
        words = [str(folder) if word == MODEL else word for word in command[2:]]
        return dry_start([*words, "--kv-cache-memory-bytes", "1M"]).served.label


def test_a_wrong_format_or_option_is_noticed(tmp_path: Path) -> None:
    from vllm_kvq.integration.preview.dry_start import WouldNotStart

    command = examples.deployment().command
    with pytest.raises(SystemExit):
        parse_serve([word.replace(RECOMMENDED, "kity2") for word in command])
    with pytest.raises(SystemExit):
        parse_serve([*command, "--max-model-length", "5"])
    with pytest.raises(WouldNotStart, match="'Q'"):
        planned([*command, "--additional-config", '{"kvq": {"Q": 1}}'], tmp_path)


@pytest.mark.parametrize("name", SERVERS)
def test_a_pod(name: str) -> None:
    """As Kubernetes's own schema describes it; probes ask vLLM's own endpoint on the port that it listens to."""
    example = SERVERS[name]()
    validate(pod(example.pod))
    mounts = {mount["name"] for c in example.pod["containers"] for mount in c.get("volumeMounts", ())}
    assert mounts == {volume["name"] for volume in example.pod["volumes"]}
    probes = [value for name, value in example.container.items() if name.endswith("Probe")]
    assert probes
    for probe in probes:
        assert probe["httpGet"]["path"] in endpoints()
        assert example.port(probe["httpGet"]["port"]) == parse_serve(example.command).port
    # the production stack's chart leaves it out, and calls no service "vllm"
    assert example.pod.get("enableServiceLinks") is (None if name == "production-stack.yaml" else False)
    assert parse_serve(example.command).shutdown_timeout < example.pod.get("terminationGracePeriodSeconds", 30)


@functools.cache
def endpoints() -> set[str]:
    from vllm.entrypoints.openai.api_server import build_app

    app = build_app(parse_serve(["vllm", "serve", "any"]), ("generate",))
    return {route.path for route in app.routes if hasattr(route, "path")}


def pod(spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_what_kubectl_gets() -> None:
    documents = examples.documents("deployment.yaml")
    for document in documents:
        validate(document)
    claim, deployment, service = documents
    spec = deployment["spec"]["template"]
    assert spec["metadata"]["labels"].items() >= deployment["spec"]["selector"]["matchLabels"].items()
    assert spec["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    claims = [v["persistentVolumeClaim"]["claimName"] for v in spec["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [claim["metadata"]["name"]]
    assert examples.deployment().port(service["spec"]["ports"][0]["targetPort"]) == 8000
    # exit status 0 after a crash: docs/operating.md
    assert spec["spec"]["restartPolicy"] == "Always"


def test_the_pod_agrees_with_the_image() -> None:
    example = examples.deployment()
    image = (examples.ROOT / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    user, home = re.findall(r"^USER (\d+)$", image, re.M)[-1], re.findall(r"HOME=(\S+)", image)[-1]
    assert example.pod["securityContext"]["runAsUser"] == int(user)
    (cache,) = [m["mountPath"] for m in example.container["volumeMounts"] if m["name"] == "models"]
    assert cache == f"{home}/.cache"


@pytest.mark.parametrize("name", ["production-stack.yaml", "llm-d.yaml"])
def test_an_init_container_brings_the_plugin(name: str) -> None:
    """From a stage of docker/Dockerfile.gpu to the folder that the server's PYTHONPATH names."""
    example = SERVERS[name]()
    (first,) = example.pod["initContainers"]
    (mount,) = first["volumeMounts"]
    (copy,) = [shlex.split(line) for line in first["args"]]
    image = (examples.ROOT / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    assert copy[:2] == ["cp", "-r"]
    assert f"--target {copy[2].removesuffix('/.')} " in re.split(r"^FROM ", image, flags=re.M)[2]
    assert copy[3] == mount["mountPath"]
    assert {"name": "PYTHONPATH", "value": copy[3]} in example.container["env"]
    assert {"name": mount["name"], "mountPath": copy[3]} in example.container["volumeMounts"]
    (base,) = re.findall(r"^ARG VLLM=(\S+)$", image, re.M)
    assert example.container["image"] == f"vllm/vllm-openai:{base}"


def test_ray_hands_on_what_vllm_takes() -> None:
    """Ray gives `engine_kwargs` to AsyncEngineArgs as they are."""
    from vllm import AsyncEngineArgs

    from vllm_kvq.integration.plugin import register

    register()
    config = examples.ray_config()
    arguments = AsyncEngineArgs(model=config["model_loading_config"]["model_source"], **config["engine_kwargs"])
    assert arguments.kv_cache_dtype == RECOMMENDED
    for spec in examples.ray_pods():
        validate(pod(spec))
        assert spec["enableServiceLinks"] is False


def test_ray_takes_the_configuration() -> None:
    pytest.importorskip("pyarrow", reason='pip install "ray[serve]" pyarrow jsonref: Ray Serve is not installed')
    llm = pytest.importorskip("ray.serve.llm", reason='pip install "ray[serve]" pyarrow jsonref')
    assert llm.LLMConfig(**examples.ray_config()).engine_kwargs == examples.ray_config()["engine_kwargs"]


def test_the_ray_image_has_the_version_of_the_cluster() -> None:
    (service,) = examples.documents("rayservice.yaml")
    image = (examples.FOLDER / "Dockerfile.ray").read_text(encoding="utf-8")
    assert re.findall(r"ray\[[\w,]+\]==([\d.]+)", image) == [service["spec"]["rayClusterConfig"]["rayVersion"]]


@pytest.mark.parametrize("name", CHARTS)
def test_fields_are_the_charts(name: str) -> None:
    """By the schemas of the charts and of KubeRay, of which scripts/charts.py keeps what these files set."""
    (document,) = examples.documents(name)
    assert mistakes(name, document) == []


@pytest.mark.parametrize("name", CHARTS)
def test_a_wrong_field_is_noticed(name: str) -> None:
    """A mistyped name, except where any name may stand; a value of another type, where a schema says the type."""
    (document,) = examples.documents(name)
    free, unseen, places = set(), set(), list(charts.places(document))
    for place in places:
        inside = functools.reduce(lambda inner, key: inner[key], place[:-1], document)
        value = inside.pop(place[-1])
        inside["mistyped"] = value
        if not mistakes(name, document):
            free.add(place[-2])
        del inside["mistyped"]
        inside[place[-1]] = 1.5
        if not mistakes(name, document):
            unseen.add(place)
        inside[place[-1]] = value
    assert free <= {"rayStartParams", "limits", "requests"}
    assert len(places) - len(unseen) > 15


def mistakes(name: str, document: Any) -> list[str]:
    return [error.message for error in schema(name).iter_errors(document)]


@functools.cache
def schema(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(examples.chart(name)["schema"])


@pytest.mark.parametrize("name", examples.CHARTED)
def test_what_helm_makes_of_it(name: str) -> None:
    """Kubernetes takes everything that a cluster would get."""
    text = (examples.FOLDER / name).read_text(encoding="utf-8")
    kept = examples.chart(name)
    assert kept["rendered_of"] == charts.fingerprint(text), "run scripts/charts.py, which asks Helm again"
    for document in kept["rendered"]:
        validate(document)
    assert f"chart `{kept['chart'].split()[0]}`" in (examples.FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", ["startupProb", "image", "enableServiceLink"])
def test_a_wrong_pod_is_noticed(fault: str) -> None:
    wrong = {**examples.deployment().pod, fault: {}}
    with pytest.raises(kubernetes_validate.ValidationError, match=fault):
        validate(pod(wrong))


@pytest.mark.parametrize("name", CHARTS)
def test_whose_the_schemas_are(name: str) -> None:
    kept = examples.chart(name)
    assert kept["licence"] == "Apache-2.0"
    assert re.fullmatch(r"[0-9a-f]{40}", kept["commit"])
    assert kept["repository"] in {chart.repository for chart in charts.ALL}


def test_every_file_is_described() -> None:
    readme = (examples.FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in FILES if f"`{name}`" not in readme] == []
    assert set(FILES) == {*SERVERS, "rayservice.yaml"} == {*CHARTS, "deployment.yaml"}
    for name in FILES:
        text = (examples.FOLDER / name).read_text(encoding="utf-8")
        assert f"examples/kubernetes/{name}" in text
