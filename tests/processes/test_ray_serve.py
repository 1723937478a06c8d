"""examples/ray_serve.py: Ray Serve's OpenAI-compatible endpoint answers from a low-bit cache, here on CPUs."""

from __future__ import annotations

import importlib.util
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray_cluster import ENGINE, PATIENCE, ROOT, Cluster

from vllm_kvq.bench.servers.server import free_port

RAYS_OWN = "ignore:Support for class-based `config`|Pydantic V1 style|The `dict` method:DeprecationWarning"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings(RAYS_OWN)]
REASON = 'Ray Serve is not installed: pip install "ray[data,serve]==2.60.0" pyarrow==21.0.0 jsonref==1.1.0'
for module in ("pyarrow", "jsonref", "ray.serve", "ray.serve.llm"):
    pytest.importorskip(module, reason=REASON, exc_type=ImportError)

SCRIPT = ROOT / "examples" / "ray_serve.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_serve", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def test_the_command_line_becomes_what_ray_takes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given and nothing else, configurations as dictionaries."""
    given = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    command = [
        "ray_serve.py",
        "--model",
        "a",
        "--kv-cache-dtype",
        "kitty2",
        "--served-model-name",
        "b",
        "--replicas",
        "2",
    ]
    command += ["--kv-transfer-config", json.dumps(given), "-cc.mode=0", "--kv-cache-memory-bytes", "64M"]
    monkeypatch.setattr("sys.argv", command)
    options, engine, arguments = script.arguments()
    assert (options.replicas, engine.served_model_name) == (2, ["b"])
    assert arguments.pop("compilation_config")["mode"] == 0
    assert arguments == {"kv_cache_dtype": "kitty2", "kv_transfer_config": given, "kv_cache_memory_bytes": 64 << 20}


@pytest.mark.wide
@pytest.mark.engine
def test_a_question(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    port = free_port("127.0.0.1")
    command = [str(SCRIPT), "--model", str(model), *ENGINE, "--served-model-name", "tiny", "--port", str(port)]
    job = cluster.job(tmp_path, *command)
    url = f"http://127.0.0.1:{port}/v1"

    def served() -> bool:
        try:
            return [found["id"] for found in asked(f"{url}/models")["data"]] == ["tiny"]
        except (OSError, KeyError):
            return False

    job.until(served)
    body = {"model": "tiny", "prompt": "count from 1 to", "max_tokens": 8, "temperature": 0}
    first, again = (asked(f"{url}/completions", body) for _ in range(2))
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != ""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(f"{url}/completions", body | {"model": "another"})
    job.until(lambda: "kvq: format=kitty2" in job.said(), seconds=60)
    assert len(cluster.engines()) == 1
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    cluster.without_engines()


def test_why_a_replica_does_not_start(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve.run` raises without the reason, which only the status has. The server is taken down all the same."""
    done: list[str] = []

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application default failed")

    failed = SimpleNamespace(deployments={"a": SimpleNamespace(message="kitty2 does not support that")})
    stub = SimpleNamespace(
        start=lambda **_: None,
        run=run,
        status=lambda: SimpleNamespace(applications={"default": failed}),
        shutdown=lambda: done.append("shutdown"),
    )
    monkeypatch.setattr(script, "serve", stub)
    monkeypatch.setattr(script, "arguments", lambda: (SimpleNamespace(host="h", port=1), None, {}))
    monkeypatch.setattr(script, "config", lambda *_: None)
    monkeypatch.setattr(script, "build_openai_app", lambda _: None)
    monkeypatch.setattr(script.ray, "init", lambda **_: None)
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == "Deploying application default failed\nkitty2 does not support that"
    assert done == ["shutdown"]


def test_a_gpu_for_each_rank(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's own way, without what CPUs need."""
    monkeypatch.setattr(script.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(script.ray, "cluster_resources", lambda: {"GPU": 8.0})
    given = {"kv_cache_dtype": "kitty2", "tensor_parallel_size": 2}
    engine = script.AsyncEngineArgs(model="a", **given)
    config = script.config(engine, given, SimpleNamespace(replicas=4, cpus=1))
    assert config.engine_kwargs == given
    assert config.model_loading_config.model_id == "a"
    assert (config.placement_group_config, config.runtime_env) == (None, None)
    assert config.deployment_config == {"num_replicas": 4}
    assert config.get_engine_config().placement_bundles == [{"GPU": 1}] * 2
    with pytest.raises(SystemExit) as stop:
        script.config(engine, given, SimpleNamespace(replicas=5, cpus=1))
    assert stop.value.code == "the cluster has 8 GPUs and needs 10; ask for fewer --replicas"
