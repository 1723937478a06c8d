"""examples/kubernetes, as far as it can be tested without a cluster."""

from __future__ import annotations

import functools
import os
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_examples as examples
import pytest
import yaml
from kubernetes_examples import SERVERS
from serve_arguments import parse_serve

from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.table import suite

CHARTS = "KVQ_CHARTS"
"""The variable that names a folder with clones of the charts' repositories."""
MODEL = "Qwen/Qwen3-8B"
VERSION = "1.34"
"""Of Kubernetes."""
FILES = sorted(path.name for path in examples.FOLDER.glob("*.yaml"))
SCHEMA = yaml.safe_load((Path(__file__).parent / "kubernetes_fields.yaml").read_text(encoding="utf-8"))
KINDS = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


@pytest.mark.parametrize("name", SERVERS)
def test_vllm_and_the_plugin_take_the_arguments(name: str, tmp_path: Path) -> None:
    command = SERVERS[name]().command
    parsed = parse_serve(command)
    assert (parsed.port, parsed.enable_prefix_caching) in {(8000, True), (8000, None)}
    assert parsed.kv_cache_dtype == suite("usual")[0]
    assert parsed.max_model_len
    assert planned(command, tmp_path) == suite("usual")[0]


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
        parse_serve([word.replace("kitty2", "kity2") for word in command])
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
    assert parse_serve(example.command).shutdown_timeout < example.pod.get("terminationGracePeriodSeconds", 30)


@functools.cache
def endpoints() -> set[str]:
    from vllm.entrypoints.openai.api_server import build_app

    app = build_app(parse_serve(["vllm", "serve", "any"]), ("generate",))
    return {route.path for route in app.routes if hasattr(route, "path")}


def pod(spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}


def validate(document: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate brings the schemas")
    schemas.validate(document, VERSION, strict=True)


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
    assert cache == f"{home}/.cache/huggingface"


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
    assert arguments.kv_cache_dtype == suite("usual")[0] in FORMATS
    for spec in examples.ray_pods():
        validate(pod(spec))


def test_ray_takes_the_configuration() -> None:
    pytest.importorskip("pyarrow", reason='pip install "ray[serve]" pyarrow jsonref: Ray Serve is not installed')
    llm = pytest.importorskip("ray.serve.llm", reason='pip install "ray[serve]" pyarrow jsonref')
    assert llm.LLMConfig(**examples.ray_config()).engine_kwargs == examples.ray_config()["engine_kwargs"]


def test_the_ray_image_has_the_version_of_the_cluster() -> None:
    (service,) = examples.documents("rayservice.yaml")
    image = (examples.FOLDER / "Dockerfile.ray").read_text(encoding="utf-8")
    assert re.findall(r"ray\[[\w,]+\]==([\d.]+)", image) == [service["spec"]["rayClusterConfig"]["rayVersion"]]


@pytest.mark.parametrize("name", SCHEMA)
def test_fields_are_the_charts(name: str) -> None:
    """kubernetes_fields.yaml keeps the fields that these files set, as the charts' schemas describe them."""
    known = SCHEMA[name]["fields"]
    (document,) = examples.documents(name)
    found = dict(examples.fields(document))
    assert set(found) == set(known)
    for path, value in found.items():
        kinds = tuple(KINDS[kind] for kind in str(known[path]).split("|"))
        assert type(value) in kinds, f"{path} is {value!r}"


def test_every_file_is_described() -> None:
    readme = (examples.FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in FILES if f"`{name}`" not in readme] == []
    assert set(FILES) == {*SERVERS, "rayservice.yaml"} == {*SCHEMA, "deployment.yaml"}
    for name in FILES:
        text = (examples.FOLDER / name).read_text(encoding="utf-8")
        assert f"examples/kubernetes/{name}" in text


@pytest.mark.parametrize("name", SCHEMA)
def test_fields_are_in_the_charts_own_schema(name: str) -> None:
    """With KVQ_CHARTS=folder, in which the charts' repositories are cloned."""
    if CHARTS not in os.environ:
        pytest.skip(f"{CHARTS} names no folder with clones of the charts' repositories")
    import jsonschema

    entry = SCHEMA[name]
    schema = yaml.safe_load((Path(os.environ[CHARTS]) / entry["repository"] / entry["schema"]).read_text("utf-8"))
    if schema.get("kind") == "CustomResourceDefinition":
        (version,) = [v for v in schema["spec"]["versions"] if v["name"] == "v1"]
        schema = version["schema"]["openAPIV3Schema"]
    (document,) = examples.documents(name)
    jsonschema.validate(document, closed(schema))


def closed(schema: Any) -> Any:
    """With every object that lists its fields closed, so that a field that is not there is a mistake."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(inner) for name, inner in schema.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    if isinstance(made.get("properties"), dict) and not made.get("additionalProperties"):
        made["additionalProperties"] = False
    return made
