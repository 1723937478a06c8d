"""docker/, mostly as far as it can be tested without a container engine. install.sh is tested in test_shipping.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_arguments import parse_serve

from vllm_kvq.formats.budgets import RECOMMENDED
from vllm_kvq.integration.plan import calibration
from vllm_kvq.kernels.folders import CACHE

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.gpu")
SECRETS = {"HF_TOKEN", "VLLM_API_KEY"}
VARIABLES = SECRETS | {"MODEL", "FORMAT", "MAX_MODEL_LEN", "OPTIONS", "KVCACHE_GIB", "MEMORY"}


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each line, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def final_stage(name: str) -> list[tuple[str, str]]:
    lines = instructions(name)
    return lines[max(i for i, (what, _) in enumerate(lines) if what == "FROM") :]


def entry_point(name: str) -> list[str]:
    return json.loads(dict(final_stage(name))["ENTRYPOINT"])


def read_compose(**variables: str) -> dict[str, Any]:
    """As compose itself reads it: it exits with status 1 on a mistake."""
    command = [str(BIN / "docker-compose"), "-f", str(DOCKER / "compose.yaml"), "--profile", "*", "config"]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_compose()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_accepts(name: str) -> None:
    done = subprocess.run([str(BIN / "hadolint"), str(DOCKER / name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image(name: str) -> None:
    stage = final_stage(name)
    what = dict(stage)
    assert int(what["USER"]) > 0
    assert "/health" in what["HEALTHCHECK"]
    assert what["EXPOSE"] == "8000"
    # what the first stage makes is mounted for the installation, and nothing of it is copied
    assert "COPY" not in what
    runs = [arguments for instruction, arguments in stage if instruction == "RUN"]
    (install,) = [run for run in runs if "install.sh" in run]
    assert "from=wheels,source=/wheels" in install
    assert (ROOT / re.findall(r"source=(docker/\S+),", install)[0]).is_file()
    made = next(run for instruction, run in instructions(name) if instruction == "RUN" and "--output /wheels" in run)
    assert (ROOT / made.split()[1]).is_file()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_first_stage_has_our_pins(name: str) -> None:
    (install,) = [run for what, run in instructions(name) if what == "RUN" and "auditwheel" in run]
    pins = [word for word in shlex.split(install) if re.search("[=<>]", word)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert len(pins) == 4
    assert set(pins) <= set(known)


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is not installed")
def test_the_cpu_image_is_built(tmp_path: Path) -> None:
    """Without root and without a daemon, in storage of its own."""
    storage = ("--root", str(tmp_path / "images"), "--runroot", str(tmp_path / "running"), "--storage-driver", "vfs")

    def buildah(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["buildah", *storage, *words], cwd=ROOT, capture_output=True, text=True)

    bases = [line.split()[0] for what, line in instructions("Dockerfile.cpu") if what == "FROM"]
    for base in bases:
        if (pulled := buildah("pull", f"docker.io/library/{base}")).returncode:
            pytest.skip(f"{base} can't be downloaded: {pulled.stderr.strip().splitlines()[-1]}")
    how = ("--isolation", "chroot", "--format", "docker")
    built = buildah("bud", *how, "--file", "docker/Dockerfile.cpu", "--tag", "kvq:cpu", ".")
    assert built.returncode == 0, built.stderr[-4000:]
    config = json.loads(buildah("inspect", "--type", "image", "kvq:cpu").stdout)["Docker"]["config"]
    assert config["User"] == "10001"
    assert config["Entrypoint"] == entry_point("Dockerfile.cpu")


def test_the_gpu_image_has_a_vllm_that_we_support() -> None:
    from vllm_kvq.integration.patches.names import SUPPORTED

    (version,) = [value for what, value in instructions("Dockerfile.gpu") if what == "ARG"]
    assert version.removeprefix("VLLM=v").rsplit(".", 1)[0] in SUPPORTED


@pytest.mark.parametrize(("service", "name"), [("cpu", "Dockerfile.cpu"), ("gpu", "Dockerfile.gpu")])
def test_vllm_knows_the_command(service: str, name: str, compose: dict[str, Any]) -> None:
    """The image's entry point with the service's arguments, given to the parser of `vllm serve`."""
    parsed = parse_serve(entry_point(name) + compose["services"][service]["command"])
    assert parsed.model_tag == "Qwen/Qwen3-0.6B"
    assert parsed.kv_cache_dtype == RECOMMENDED
    assert (parsed.host, parsed.port, parsed.max_model_len) == ("0.0.0.0", 8000, None)
    grace = compose["services"][service]["stop_grace_period"]
    assert 0 < parsed.shutdown_timeout < int(grace.removesuffix("s"))


@pytest.mark.parametrize("service", ["cpu", "gpu"])
def test_variables_reach_the_server(service: str) -> None:
    options = """--additional-config '{"kvq": {"W": 64}}' --seed 7"""
    found = read_compose(
        MODEL="/a folder",
        FORMAT="polar4",
        MAX_MODEL_LEN="4096",
        OPTIONS=options,
        MEMORY="3g",
        HF_TOKEN="a",
        VLLM_API_KEY="b",
    )["services"][service]
    parsed = parse_serve(entry_point(f"Dockerfile.{service}") + found["command"])
    assert (parsed.model_tag, parsed.kv_cache_dtype, parsed.max_model_len) == ("/a folder", "polar4", 4096)
    assert (parsed.additional_config, parsed.seed) == ({"kvq": {"W": 64}}, 7)
    assert int(found["mem_limit"]) == 3 << 30
    assert {name: found["environment"][name] for name in SECRETS} == {"HF_TOKEN": "a", "VLLM_API_KEY": "b"}


def test_what_is_not_set_is_not_handed_on(compose: dict[str, Any]) -> None:
    """A variable without a value reaches the container only if the shell has it."""
    for service in ("cpu", "gpu"):
        assert {name: compose["services"][service]["environment"][name] for name in SECRETS} == dict.fromkeys(SECRETS)


def test_every_service_has_a_limit_of_memory(compose: dict[str, Any]) -> None:
    limits = {name: int(service["mem_limit"]) >> 30 for name, service in compose["services"].items()}
    assert min(limits.values()) > 0
    assert limits["cpu"] > int(compose["services"]["cpu"]["environment"]["VLLM_CPU_KVCACHE_SPACE"]) + 4


@pytest.mark.parametrize("service", ["cpu", "gpu"])
def test_a_service(service: str, compose: dict[str, Any]) -> None:
    found = compose["services"][service]
    build = found["build"]
    assert (Path(build["context"]) / build["dockerfile"]).is_file()
    (cache,) = found["volumes"]
    assert cache["target"] == f"{dict(final_stage(f'Dockerfile.{service}'))['WORKDIR']}/.cache"
    assert "server" in found["networks"]["default"]["aliases"]
    if service == "cpu":
        assert int(found["environment"]["VLLM_CPU_KVCACHE_SPACE"]) > 0


@pytest.mark.parametrize("service", ["cpu", "gpu"])
def test_the_volume_keeps_constants(service: str, compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are fitted to a model when it is first served."""
    (cache,) = compose["services"][service]["volumes"]
    for name in ("XDG_CACHE_HOME", CACHE):
        monkeypatch.delenv(name, raising=False)
    given = [shlex.split(arguments) for what, arguments in final_stage(f"Dockerfile.{service}") if what == "ENV"]
    for name, value in (word.split("=", 1) for words in given for word in words):
        monkeypatch.setenv(name, value)
    for name, value in compose["services"][service]["environment"].items():
        monkeypatch.setenv(name, value or "")
    constants = calibration._folder()
    assert constants is not None
    assert constants.is_relative_to(cache["target"])


def test_every_file_that_is_mounted_is_there(compose: dict[str, Any]) -> None:
    mounts = [v for s in compose["services"].values() for v in s.get("volumes", []) if v["type"] == "bind"]
    assert len(mounts) == 4
    for mount in mounts:
        assert Path(mount["source"]).exists(), mount
        assert mount["read_only"], mount


def test_nothing_listens_to_other_machines(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_prometheus_finds_its_files(compose: dict[str, Any]) -> None:
    targets = {v["target"]: v["source"] for v in compose["services"]["prometheus"]["volumes"]}
    assert Path(targets["/etc/prometheus/prometheus.yml"]) == DOCKER / "prometheus.yaml"
    for name in yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["rule_files"]:
        assert Path(targets[f"/etc/prometheus/{name}"]) == DOCKER / name


def test_prometheus_asks_the_server_and_grafana_prometheus(compose: dict[str, Any]) -> None:
    scrapes = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    assert [scrape["static_configs"] for scrape in scrapes] == [[{"targets": ["server:8000"]}]]
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "vllm-kvq.yaml").read_text())["providers"]
    targets = {v["target"]: Path(v["source"]) for v in compose["services"]["grafana"]["volumes"]}
    (dashboard,) = targets[provider["options"]["path"]].glob("*.json")
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.name}"
    panels = json.loads(dashboard.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_document_names_what_is_there(compose: dict[str, Any]) -> None:
    text = (DOCKER / "README.md").read_text()
    for name in re.findall(r"-f (docker/\S+)", text):
        assert (ROOT / name).is_file()
    profiles = set(re.findall(r"--profile (\w+)", text))
    assert profiles == {p for s in compose["services"].values() for p in s["profiles"]}
    variables = set(re.findall(r"([A-Z_]+)=", text)) - {"VLLM"}
    assert variables == VARIABLES
    read = set(re.findall(r"\$\{([A-Z_]+):[-+]", (DOCKER / "compose.yaml").read_text()))
    assert read | SECRETS == VARIABLES
