"""`Farm` starts engines of one or several processes and keeps what they answered."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
from forked_commands import WarmProcess

from proof.oracle.compare import compare_all
from proof.oracle.engines.engine import ENVIRONMENT
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel
from proof.oracle.trace import Request, Result, Trace
from vllm_kvq.bench.models.random_model import random_model

HERE = Path(__file__).parent
N = 32
ENGINE = {
    "block_size": N,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "num_gpu_blocks_override": 400,
    "skip_tokenizer_init": True,
}
VARIABLES = {
    **ENVIRONMENT,
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "RAY_USAGE_STATS_ENABLED": "0",
    # float32 throughout: only sums in another order separate several processes from one
    "VLLM_KVQ_KERNELS": "torch",
}
TP, PP = ({f"{kind}_parallel_size": 2, "distributed_executor_backend": "mp"} for kind in ("tensor", "pipeline"))
BYTES = 48 << 20
RAY = {"distributed_executor_backend": "ray"}
# vLLM's CPU runner makes the buffers for what one stage hands to the next in its warm-up, which it leaves out in eager
# mode, with or without us. So the stages are traced; without inductor, which would take longer than the traces.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
ELSEWHERE = "one, with constants of its own"
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    ELSEWHERE: {},
    "tp2": TP,
    "tp2 by bytes": TP | {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": BYTES},
    "tp4": TP | {"tensor_parallel_size": 4},
    "pp2": PP | TRACED,
    "dp2": {"data_parallel_size": 2},
    "ray tp2": TP | RAY,
    "ray pp2": PP | TRACED | RAY,
}
"""Engine arguments."""


def words(count: int) -> tuple[int, ...]:
    return tuple(RNG.randrange(10, 500) for _ in range(count))


def make_traces() -> list[Trace]:
    """Prompts in chunks, decodes over pages, and then prefix hits."""
    shared, near = words(7 * N), N - 5  # a page is filled and packed soon after the prompt
    cold = [Request(f"cold{n}", words(n), 8, arrival=i // 2) for i, n in enumerate((1, 33, 64, 100, 290))]
    hits = [Request("tail", shared + words(37), 8), Request("deep", shared + words(near), 12, arrival=2)]
    return [Trace((*cold, Request("long", shared + words(near), 12, arrival=3))), Trace(tuple(hits))]


def few_tokens() -> list[Trace]:
    """The same kinds, for kernels that run under an interpreter."""
    shared = words(3 * N)
    cold = (Request("cold", shared + words(5), 4), Request("one", words(1), 3, arrival=1))
    return [Trace(cold), Trace((Request("tail", shared + words(3), 4), Request("short", words(40), 4, arrival=1)))]


RNG = random.Random(1)
TRACES = make_traces()


@dataclass(frozen=True)
class Answer:
    results: list[Result]
    ranks: list[dict[str, Any]]
    """For each worker: its packed layers by name."""
    log: str


class Farm:
    def __init__(self, folder: Path, variables: dict[str, str] = VARIABLES, traces: list[Trace] = TRACES) -> None:
        self.folder, self.traces, self.count = folder, traces, itertools.count()
        self.known: dict[tuple[str, str, str], Answer] = {}
        self.models: dict[str, Path] = {}
        # `proof` is not installed: a process that runs a script does not find it in the checkout
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log = folder / "driver.log"
        self.log.touch()
        self.pipe, other = multiprocessing.Pipe()
        self.driver = WarmProcess(
            engines.drive, (other, str(self.log), {**os.environ, **variables, "PYTHONPATH": path})
        )
        self.driver.start()
        other.close()

    def close(self) -> None:
        self.pipe.close()
        self.driver.join(60)
        assert self.driver.exitcode == 0

    def cache_of(self, kind: str) -> Path:
        """Where engines keep the constants that they fit, and look for them."""
        return self.folder / ("elsewhere" if kind == ELSEWHERE else "cache")

    def model(self, name: str) -> Path:
        """Four layers with two KV heads; or with one KV head that two ranks hold copies of."""
        if name not in self.models:
            heads = {"two heads": 2, "one head": 1}[name]
            folder = self.folder / name.replace(" ", "-")
            self.models[name] = random_model(folder, hidden=128, layers=4, heads=4, kv_heads=heads)
        return self.models[name]

    def run(self, kind: str, *formats: str, model: str = "two heads") -> list[Answer]:
        """The answers of one engine per format; answers of one process are asked for two at a time."""
        missing = [f for f in dict.fromkeys(formats) if (kind, f, model) not in self.known]
        step = 2 if kind == "one" else 1
        for at in range(0, len(missing), step):
            self._start(kind, missing[at : at + step], model)
        return [self.known[kind, f, model] for f in formats]

    def _start(self, kind: str, formats: list[str], model: str) -> None:
        jobs = [self._job(kind, f, model) for f in formats]
        self.pipe.send(jobs)
        try:
            codes = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"the driver exited:\n{self.log.read_text()[-4000:]}") from None
        for name, job, code in zip(formats, jobs, codes, strict=True):
            said = Path(job["log"]).read_text(encoding="utf-8")[-6000:]
            assert code == 0, f"{kind}, {name} exited with {code}:\n{said}"
            out = json.loads(Path(job["out"]).read_text(encoding="utf-8"))
            self.known[kind, name, model] = Answer(
                [Result.from_json(r) for r in out["results"]],
                out["ranks"],
                Path(job["log"]).read_text(encoding="utf-8", errors="replace"),
            )

    def _job(self, kind: str, name: str, model: str) -> dict[str, Any]:
        at = self.folder / f"{next(self.count)}-{kind.replace(' ', '-')}-{name}"
        return {
            "model": str(self.model(model)),
            "engine": {**ENGINE, **KINDS[kind], "kv_cache_dtype": name},
            "ray": 2 if "ray" in kind else 0,
            # two ranks of `qjl3` show that workers which are not forked find the plugin, as a server's do
            "fork": (kind, name) != ("tp2", "qjl3"),
            "variables": {"XDG_CACHE_HOME": str(self.cache_of(kind))},
            "traces": [t.to_json() for t in self.traces],
            "out": f"{at}.out",
            "log": f"{at}.log",
        }


def same_tokens(farm: Farm, kind: str, name: str, model: str = "two heads", error: float = 0.0) -> Answer:
    """The answer, compared with that of one process: `lossless` with plain vLLM's, the others with their own.

    Ranks add up in another order than one process, and a code on the border of two cells is then rounded the other way
    (`lossless` has no codes). Where a token differs, the reference has to judge it a tie; `error` is what the kernels
    in use declare.
    """
    got = farm.run(kind, name, model=model)[0]
    one = farm.run("one", "auto" if name == "lossless" else name, model=model)[0]
    verdict = compare_all(farm.traces, one.results, got.results)
    assert verdict.hits == sum(r.name in ("tail", "deep") for t in farm.traces for r in t.requests)
    assert verdict.tokens == sum(r.max_tokens for t in farm.traces for r in t.requests)
    if verdict.mismatches and name != "lossless":
        reference = ReplayModel(str(farm.model(model)), name, N, kernel_error=error)
        judged = judge(reference, farm.traces, got.results)
        assert judged.tokens == verdict.tokens
        assert judged.ties <= 0.02 * judged.tokens
        verdict = judged
    assert not verdict.mismatches
    return got
