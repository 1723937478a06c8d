"""`vllm serve` as on a GPU: the V2 model runner, asynchronous scheduling, drafts, and a layer's step on the GPU's path.
All Triton kernels are interpreted."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import traces
from completions import complete
from prometheus_client.parser import text_string_to_metric_families

from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Chunk, Request, Result, Trace
from vllm_kvq.bench.servers.server import Server, free_port

pytestmark = [pytest.mark.engine, pytest.mark.wide]
N, DRAFTS, BUDGET = 32, 2, 64
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
BLOCKS = 55
"""Each of three requests takes three blocks, and one of them is preempted when they grow."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--kv-cache-dtype", "squat2", "--block-size", str(N), "--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-model-len", "256", "--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "4"]
    arguments += ["--num-gpu-blocks-override", str(BLOCKS), "--speculative-config", json.dumps(NGRAM)]
    arguments += ["--async-scheduling", "--served-model-name", "tiny", "--skip-tokenizer-init"]
    started = Server(str(model), arguments, "127.0.0.1", free_port("127.0.0.1"), tmp_path_factory.mktemp("log") / "log")
    started.command[:1] = [sys.executable, "-m", "proof.oracle.engines.vllm_v2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, value in (("VLLM_KVQ_GPU_PATH", "1"), ("VLLM_KVQ_KERNELS", "torch")):
            patch.setenv(name, value)
        with started:
            started.wait_until_healthy(300)
            yield started
            assert started.stop() == 0


def scrape(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        return answer.read().decode()


def numbers(server: Server) -> dict[str, float]:
    families = text_string_to_metric_families(scrape(server))
    return {s.name.removeprefix("vllm:"): s.value for f in families for s in f.samples if s.name.startswith("vllm:")}


def as_result(request: Request, tokens: list[int]) -> Result:
    """What the scheduler does with one request on an idle server: the prompt in chunks, then token by token."""
    pages, size = list(range(1, 100)), len(request.prompt)
    parts = [(at, min(BUDGET, size - at)) for at in range(0, size, BUDGET)]
    parts += [(size + i, 1) for i in range(len(tokens) - 1)]
    steps = [[Chunk(f"{request.name}-0", at, count, pages=pages)] for at, count in parts]
    return Result({request.name: [tokens]}, {}, steps, 0, (0, 0))


def test_answers_are_the_references_and_hits_repeat(server: Server, model: Path) -> None:
    request = traces.few(N)[0].requests[0]
    before = numbers(server)
    tokens = complete(server.url, request.prompt, request.max_tokens)
    reference = ReplayModel(str(model), "squat2", N, DRAFTS, kernel_error=1e-3)
    verdict = judge(reference, [Trace((request,))], [as_result(request, tokens)])
    assert not verdict.mismatches
    assert verdict.tokens == request.max_tokens
    cold = numbers(server)
    assert cold["prefix_cache_hits_total"] == before["prefix_cache_hits_total"]
    hit = complete(server.url, request.prompt, request.max_tokens)
    assert numbers(server)["prefix_cache_hits_total"] >= N
    assert complete(server.url, request.prompt, request.max_tokens) == hit


def test_a_crowd_is_preempted_and_drafts_are_judged(server: Server) -> None:
    prompts = [tuple(100 * i + j % 30 for j in range(3 * N - 4)) for i in range(1, 4)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: complete(server.url, prompt, 8), prompts))
    assert [len(tokens) for tokens in answers] == [8] * len(prompts)
    found = numbers(server)
    assert found["num_preemptions_total"] > 0
    assert 0 <= found["spec_decode_num_accepted_tokens_total"] < found["spec_decode_num_draft_tokens_total"]


def test_a_client_that_goes_away_leaves_nothing(server: Server) -> None:
    body = {"model": "tiny", "prompt": list(range(10, 60)), "max_tokens": 150, "ignore_eos": True, "stream": True}
    body |= {"detokenize": False}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        answer.readline()
        assert numbers(server)["num_requests_running"] == 1
    deadline = time.monotonic() + 60
    while numbers(server)["kvq_full_precision_tokens"] and time.monotonic() < deadline:
        time.sleep(0.2)
    found = numbers(server)
    assert found["num_requests_running"] == found["kvq_packed_tokens"] == found["kvq_full_precision_tokens"] == 0
    assert found["kvq_clamped_total"] == 0
    assert found["kvq_capacity_tokens"] > 0
    assert 'path="GPU/Triton"' in scrape(server)
