"""Our numbers on a real server's /metrics, compared with what its requests really have in the cache."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import promql_parser
import pytest
import torch
import yaml
from forked_commands import ForkedServer
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from proof.demo.capacity import parse_capacity
from vllm_kvq.bench.servers.server import Server, free_port
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.integration.core.held import SECONDS
from vllm_kvq.integration.metrics import METRICS

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
N, LAYERS, HEADS, HEAD_SIZE, MOST = 64, 2, 2, 64, 4096
PROMPT, ANSWER = 300, 3000
BUSY = 4
"""Seconds that a process of the server may be late."""
BROKEN = 7
"""A token whose embedding is not a number; no other prompt has it."""
Scrape = dict[str, float]


@contextmanager
def serving(model: Path, folder: Path, *more: str) -> Iterator[Server]:
    """The random model with a broken token, in innerq2, whose sinks and window are not empty."""
    model = shutil.copytree(model, folder / "model")
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][BROKEN] = torch.nan
    tensors["lm_head.weight"][BROKEN] = 0
    save_file(tensors, weights, {"format": "pt"})
    arguments = ["--kv-cache-dtype", "innerq2", "--enforce-eager", "--served-model-name", "tiny", "--dtype", "float32"]
    arguments += ["--skip-tokenizer-init", "--max-model-len", str(MOST), "--block-size", str(N), *more]
    started = ForkedServer(str(model), arguments, "127.0.0.1", free_port("127.0.0.1"), folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # --enforce-eager leaves vLLM's sampler compiled
        with started:
            started.wait_until_healthy(240)
            yield started
            assert started.stop() == 0
    assert list(folder.glob("vllm-kvq-metrics-*")) == [], "the folder of the metrics is left behind"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server")) as started:
        yield started


def scrape(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=240) as answer:
        return answer.read().decode()


def numbers(server: Server) -> Scrape:
    """By the name of the sample: vLLM's and our metrics that have one series."""
    families = text_string_to_metric_families(scrape(server))
    return {s.name.removeprefix("vllm:"): s.value for f in families for s in f.samples if s.name.startswith("vllm:")}


def complete(server: Server, prompt: list[int], tokens: int) -> int:
    """The tokens of the answer, streamed so that the server notices when we go away."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    return [10 + (seed * 31 + i * 7) % 90 for i in range(tokens)]


def test_before_the_first_request(server: Server) -> None:
    text, found = scrape(server), numbers(server)
    for name in ("packed_tokens", "full_precision_tokens", "sidecar_bytes", "bits_per_element", "clamped_total"):
        assert found[f"kvq_{name}"] == 0
    (info,) = re.findall(r"^vllm:kvq_info\{(.*)\} 1.0$", text, re.MULTILINE)
    wanted = {"format": "innerq2", "path": "C++", "block_size": str(N), "window": "96", "sinks": "32"}
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    assert re.search(
        rf"kvq: format=innerq2 .* fingerprint={labels.pop('fingerprint')}$", server.read_log(), re.MULTILINE
    )
    assert labels == wanted | {"model_name": "tiny", "engine": "0"}
    said = parse_capacity(server.read_log())
    assert said is not None
    assert found["kvq_capacity_tokens"] == said.tokens


def test_series_have_the_labels_of_vllms_own(server: Server) -> None:
    text = scrape(server)
    (vllms,) = re.findall(r"^vllm:num_requests_running\{(.*)\}", text, re.MULTILINE)
    for metric in METRICS:
        name = f"{metric.name}_total" if metric.counts else metric.name
        (ours,) = re.findall(rf"^{name}\{{(.*)\}}", text, re.MULTILINE)
        assert set(vllms.split(",")) <= set(ours.split(",")), metric.name


@pytest.fixture(scope="module")
def seen(server: Server) -> list[Scrape]:
    """What is scraped while requests are answered, one at a time, and when."""
    found: list[Scrape] = []
    for seed in range(1, 6):
        answered = numbers(server)["generation_tokens_total"]
        thread = threading.Thread(target=complete, args=(server, prompt(seed), ANSWER))
        thread.start()
        found = []
        while thread.is_alive():
            one = numbers(server)
            found.append(one | {"at": time.monotonic(), "sent": one["generation_tokens_total"] - answered})
            time.sleep(0.25)
        found = [one for one in found if one["kvq_full_precision_tokens"]]
        if len({one["kvq_packed_tokens"] for one in found}) > 1:
            break
    return found


def test_a_running_request_is_counted(seen: list[Scrape]) -> None:
    assert len({one["kvq_packed_tokens"] for one in seen}) > 1, "the server was too fast to be watched"
    fmt = get_format("innerq2").bind(Geometry(HEAD_SIZE, N, torch.float32), {})
    for i, one in enumerate(seen):
        packed, full = int(one["kvq_packed_tokens"]), int(one["kvq_full_precision_tokens"])
        tokens = packed + full
        assert PROMPT <= tokens <= PROMPT + ANSWER
        # read from pages: everything older than the window, in whole units, except the sinks
        assert packed == max(0, (tokens - fmt.W) // fmt.unit * fmt.unit - fmt.S)
        assert fmt.W + fmt.S <= full < fmt.W + fmt.S + fmt.unit
        # what vLLM has sent by then: our count is up to SECONDS old, tokens are in the cache before they are sent, and
        # on a busy machine either comes later
        sent = {other["at"] - one["at"]: PROMPT + other["sent"] for other in seen}
        assert tokens >= max((n for after, n in sent.items() if after < -SECONDS - BUSY), default=0) - 1
        assert tokens <= min((n for after, n in sent.items() if after > BUSY), default=PROMPT + ANSWER) + 2
        assert i == 0 or packed >= seen[i - 1]["kvq_packed_tokens"]


def test_bytes_and_bits_are_those_of_its_blocks(seen: list[Scrape], server: Server) -> None:
    fmt = get_format("innerq2").bind(Geometry(HEAD_SIZE, N, torch.float32), {})
    page = HEADS * fmt.record_bytes
    (said,) = re.findall(r"sidecar_bytes=(\d+) \(per request and layer\)", server.read_log())
    for one in seen:
        assert one["kvq_sidecar_bytes"] == LAYERS * int(said)
        tokens = int(one["kvq_packed_tokens"] + one["kvq_full_precision_tokens"])
        # the block of the next token may already be allocated
        pages = [-(-tokens // N), -(-(tokens + 1) // N)]
        bits = [8 * (n * page + int(said)) / (tokens * 2 * HEADS * HEAD_SIZE) for n in pages]
        assert any(one["kvq_bits_per_element"] == pytest.approx(b) for b in bits)
    assert seen[-1]["kvq_bits_per_element"] < seen[0]["kvq_bits_per_element"]


def test_nothing_is_left_when_it_has_ended(seen: list[Scrape], server: Server) -> None:
    found = numbers(server)
    assert found["num_requests_running"] == 0
    for name in ("packed_tokens", "full_precision_tokens", "sidecar_bytes", "bits_per_element", "clamped_total"):
        assert found[f"kvq_{name}"] == 0


def test_a_client_that_goes_away_is_counted_no_more(server: Server) -> None:
    body = {"model": "tiny", "prompt": prompt(2), "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
    body |= {"detokenize": False}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        answer.readline()
        assert numbers(server)["kvq_full_precision_tokens"] > 0
    deadline = time.monotonic() + 20
    while numbers(server)["kvq_full_precision_tokens"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert numbers(server)["kvq_full_precision_tokens"] == 0


def test_what_is_clamped_is_counted(server: Server) -> None:
    """A token that is not a number: its keys and values, and in the second layer at least those of all that follow."""
    broken = prompt(3)
    broken[50] = BROKEN
    complete(server, broken, 1)
    said = re.findall(r"kvq: (\S+): (\d+) keys or values were inf, nan", server.read_log())
    assert len(said) == LAYERS
    assert int(said[0][1]) == 2 * HEADS * HEAD_SIZE
    assert numbers(server)["kvq_clamped_total"] == sum(int(count) for _, count in said)
    # it never falls
    complete(server, prompt(4), 1)
    assert numbers(server)["kvq_clamped_total"] == sum(int(count) for _, count in said)


def dashboard_queries() -> list[str]:
    panels = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "vllm-kvq.json").read_text())["panels"]
    return [target["expr"].replace("$model", "tiny") for panel in panels for target in panel["targets"]]


def documents_queries() -> list[str]:
    queries = re.findall(r"^\| .*\? ?(?:\(alert\) )?\| `(.*)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(queries) == 6
    return queries


def alert_queries() -> list[str]:
    """Without `up`, which is Prometheus's own."""
    groups = yaml.safe_load((ROOT / "docker" / "alerts.yaml").read_text())["groups"]
    queries = [rule["expr"] for group in groups for rule in group["rules"]]
    return [query for query in queries if "vllm:" in query]


@pytest.mark.parametrize("queries", [dashboard_queries, documents_queries, alert_queries])
def test_queries_ask_for_what_a_server_has(queries: Callable[[], list[str]], server: Server) -> None:
    text = scrape(server)
    there = set(re.findall(r"^([a-z_]+:?[a-z_]+)\{", text, re.MULTILINE))
    for query in queries():
        promql_parser.parse(query)
        asked = set(re.findall(r"vllm:[a-z_]+", query))
        assert asked
        assert asked <= there, query


def test_every_metric_of_ours_is_shown_and_described(server: Server) -> None:
    ours = set(re.findall(r"^(vllm:kvq_[a-z_]+)\{", scrape(server), re.MULTILINE))
    assert ours == set(re.findall(r"^\| `(vllm:kvq_[a-z_]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert ours == {name for query in dashboard_queries() for name in re.findall(r"vllm:kvq_[a-z_]+", query)}


def test_the_documents_command(server: Server) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    command = command.replace("http://localhost:8000", server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=240)
    for metric in METRICS:
        assert metric.name in done.stdout


@pytest.mark.wide
def test_several_servers_and_ranks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's multiprocess mode, in which any API server may answer, and two ranks with a KV head each."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    broken = prompt(3)
    broken[50] = BROKEN
    with serving(model, tmp_path, "--api-server-count", "2", "--tensor-parallel-size", "2") as server:
        first = [numbers(server) for _ in range(8)]
        complete(server, broken, 1)
        (sidecar,) = re.findall(r"sidecar_bytes=(\d+) \(per request and layer\)", server.read_log())
        thread = threading.Thread(target=complete, args=(server, prompt(4), ANSWER))
        thread.start()
        seen = []
        while thread.is_alive():
            seen.append(numbers(server))
        said = re.findall(r"kvq: (\S+): (\d+) keys or values were inf, nan", server.read_log())
        last = [numbers(server) for _ in range(8)]
    assert {one["kvq_capacity_tokens"] for one in first} == {first[0]["kvq_capacity_tokens"]}
    assert {one["kvq_sidecar_bytes"] for one in seen} - {0} == {2 * LAYERS * int(sidecar)}
    assert len(said) == 2 * LAYERS
    for one in last:
        assert one["kvq_clamped_total"] == sum(int(count) for _, count in said)
        assert one["kvq_packed_tokens"] == one["kvq_full_precision_tokens"] == 0
