"""What is fuzzed: an engine's configuration and the traces it runs, as plain data that a JSON file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from proof.oracle.trace import Trace

PLAIN = "auto"
MAX_LEN = 640
PLENTY = 24
"""Requests of the maximum length that a pool without a limit holds."""
MODEL: dict[str, int] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64}
"""The model of every run: two layers, so that a wrong read in the first changes what the second stores."""


@dataclass(frozen=True)
class Setup:
    """One engine. `pool` is how many requests of the maximum length its blocks hold; None: PLENTY."""

    format: str
    block_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    pool: float | None = None
    budget: int = 2048
    max_seqs: int = 16
    drafts: int = 0
    lookup_min: int = 1
    draft_model: bool = False
    """Drafts come from a model, not from the request's own ngrams."""
    policy: str = "fcfs"
    prefix_caching: bool = True
    kernels: str = "torch"

    @property
    def variables(self) -> dict[str, str]:
        return {"VLLM_KVQ_KERNELS": self.kernels}

    @property
    def kernel_error(self) -> float:
        """Relative error of the attention output that the kernels declare (8-bit queries in QJL's)."""
        if self.kernels == "torch" or self.format == "lossless":
            return 0.0
        return 1e-2 if self.format == "qjl3" else 1e-3

    def arguments(self, draft: str = "") -> dict[str, Any]:
        """For `TracedEngine`; `draft`: path of the draft model."""
        found: dict[str, Any] = {
            "kv_cache_dtype": self.format,
            "block_size": self.block_size,
            "max_num_batched_tokens": max(self.budget, self.max_seqs * (1 + self.drafts)),
            "max_num_seqs": self.max_seqs,
            "scheduling_policy": self.policy,
            "enable_prefix_caching": self.prefix_caching,
            "max_model_len": MAX_LEN,
        }
        if self.format == PLAIN:
            found["num_gpu_blocks_override"] = PLENTY * -(-MAX_LEN // self.block_size)
        else:
            found["pool"] = self.pool or PLENTY
        if self.options:
            found["additional_config"] = {"kvq": dict(self.options)}
        if self.drafts:
            ngram = {
                "method": "ngram",
                "prompt_lookup_min": self.lookup_min,
                "prompt_lookup_max": max(3, self.lookup_min),
            }
            how = {"method": "draft_model", "model": draft} if self.draft_model else ngram
            found["speculative_config"] = {**how, "num_speculative_tokens": self.drafts}
        return found

    def plain(self) -> Setup:
        """The same engine with vLLM's own cache."""
        return replace(self, format=PLAIN, options={}, pool=None, kernels="torch")


@dataclass(frozen=True)
class Case:
    setup: Setup
    traces: tuple[Trace, ...]

    def with_traces(self, traces: tuple[Trace, ...]) -> Case:
        """The first trace always begins with an empty prefix cache."""
        first = tuple(replace(t, reset=True) if i == 0 else t for i, t in enumerate(traces))
        return replace(self, traces=first)

    @property
    def size(self) -> tuple[int, int]:
        requests = [r for t in self.traces for r in t.requests]
        return len(requests), sum(len(r.prompt) + r.max_tokens for r in requests)

    def to_json(self) -> dict[str, Any]:
        return {"setup": asdict(self.setup), "traces": [_short(t) for t in self.traces]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        return cls(Setup(**data["setup"]), ()).with_traces(tuple(Trace.from_json(t) for t in data["traces"]))


def _short(trace: Trace) -> dict[str, Any]:
    """Without the fields of requests that have their defaults."""
    data = trace.to_json()
    usual = {"arrival": 0, "n": 1, "temperature": 0.0, "seed": None, "abort_after": None, "priority": 0}
    for request in data["requests"]:
        for name, value in [*usual.items(), ("stop", ()), ("stop_token_ids", ())]:
            if request[name] == value:
                del request[name]
    return data
