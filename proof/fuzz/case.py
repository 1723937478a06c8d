"""A fuzz case: an engine's configuration and the traces it runs, as plain data that a JSON file can hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from proof.fuzz.kinds import LLAMA, MODELS, kind
from proof.models.architecture import Architecture
from proof.models.copies import COPIES
from proof.models.seeing import SEEING
from proof.oracle.adapters import ADAPTERS
from proof.oracle.engines.interpreted import RUNNER
from proof.oracle.engines.without_torchvision import without_torchvision
from proof.oracle.trace import Trace, whole
from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.table import PLAIN

MAX_LEN = 640
PLENTY = 24
"""Requests of the maximum length that a pool without a limit holds."""
MODEL: dict[str, int] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512}
"""The Llama of every run: two layers, so that a wrong read in the first changes what the second stores."""
LONG_MODEL: dict[str, Any] = MODEL | {"max_position": 1 << 16, "score_std": 2.8}
"""The Llama of long contexts, which reads about as many of 32,000 tokens as MODEL does of 600."""


@dataclass(frozen=True)
class Setup:
    """One engine. `pool` is how many requests of the maximum length its blocks hold; None: PLENTY."""

    format: str
    block_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = LLAMA
    """One of MODELS, or of COPIES."""
    max_len: int = MAX_LEN
    pool: float | None = None
    budget: int = 2048
    max_seqs: int = 16
    drafts: int = 0
    lookup_min: int = 1
    draft_model: bool = False
    """Drafts come from a model, not from the request's own ngrams."""
    policy: str = "fcfs"
    prefix_caching: bool = True
    keep_all: bool = False
    """vLLM's prefix cache keeps the windows and states of every page, not only those at a prompt's end."""
    kernels: str = "torch"
    far: bool = False
    """The blocks lie apart in a pool beyond 4 GiB."""
    runner: str = "V1"
    """vLLM's model runner: V1, which it takes on a CPU, or V2, which it takes on a GPU."""
    asynchronous: bool = False
    """A step is scheduled before the last one's tokens are known."""

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("max_len", 1),
            ("budget", 1),
            ("max_seqs", 1),
            ("drafts", 0),
            ("lookup_min", 1),
        ):
            whole(name, getattr(self, name), least)
        for name, choices in (
            ("model", (*MODELS, *COPIES)),
            ("policy", ("fcfs", "priority")),
            ("kernels", ("auto", "torch")),
            ("draft_model", (False, True)),
            ("prefix_caching", (False, True)),
            ("keep_all", (False, True)),
            ("far", (False, True)),
            ("runner", ("V1", "V2")),
            ("asynchronous", (False, True)),
        ):
            value = getattr(self, name)
            if value not in choices or type(value) is not type(choices[0]):
                raise ValueError(f"{name} is {value!r}; it takes one of {list(choices)}")
        if self.asynchronous and self.runner == "V1":
            raise ValueError("asynchronous scheduling takes the runner V2: vLLM's V1 runner for CPUs has none")
        if self.pool is not None and (type(self.pool) not in (int, float) or not 1 <= self.pool <= 1000):
            raise ValueError(f"pool is {self.pool!r}; it takes a number from 1 to 1000, or null")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options is {self.options!r}; it takes an object of options")
        if self.arch.hybrid and self.drafts:
            raise ValueError("drafts are refused for models with states on a CPU")
        if self.arch.adapter and self.drafts and self.runner == "V2":
            raise ValueError("vLLM's V2 runner crashes on drafts of models with adapters")
        if self.format != PLAIN:
            get_format(str(self.format)).bind(Geometry(self.arch.head_size, self.block_size), self.kvq)

    @property
    def arch(self) -> Architecture:
        return kind(self.model)

    @property
    def llama(self) -> dict[str, Any]:
        """The numbers of the Llama that is its model, or next to which its model is written."""
        return MODEL if self.max_len == MAX_LEN else LONG_MODEL

    @property
    def kvq(self) -> dict[str, Any]:
        """The options, and those that polar formats need for some models."""
        told = self.arch.polar or self.arch.rope != "half"
        pairing = {"pairing": self.arch.rope} if told and str(self.format).startswith("polar") else {}
        return {**pairing, **self.options}

    @property
    def variables(self) -> dict[str, str]:
        return {"VLLM_KVQ_KERNELS": self.kernels, RUNNER: str(int(self.runner == "V2"))}

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
            "max_model_len": self.max_len,
            "prefix_cache_retention_interval": None if self.keep_all else 0,
            "async_scheduling": self.asynchronous,
            **self.arch.engine,
        }
        if self.arch.vision:
            found["before"] = functools.partial(without_torchvision, self.arch.model)
        if self.format == PLAIN:
            layers = self.arch.text().num_hidden_layers  # each may have blocks of its own
            found["num_gpu_blocks_override"] = PLENTY * layers * -(-self.max_len // self.block_size)
            if self.arch.hybrid or self.arch.adapter:
                found["before"] = mend
        else:
            found |= {"pool": self.pool or PLENTY, "far": self.far}
        if self.kvq:
            found["additional_config"] = {"kvq": self.kvq}
        if self.drafts:
            ngram = {
                # vLLM schedules asynchronously only what drafts on the device
                "method": "ngram_gpu" if self.asynchronous else "ngram",
                "prompt_lookup_min": self.lookup_min,
                "prompt_lookup_max": max(3, self.lookup_min),
            }
            how = {"method": "draft_model", "model": draft} if self.draft_model else ngram
            found["speculative_config"] = {**how, "num_speculative_tokens": self.drafts}
        return found

    def plain(self) -> Setup:
        """The same engine with vLLM's own cache and its runner for CPUs. Its pages divide a model's attention chunks:
        vLLM itself has no smaller ones for the layers that attend in chunks."""
        block = math.gcd(self.block_size, getattr(self.arch.text(), "attention_chunk_size", None) or 0)
        own: dict[str, Any] = {"format": PLAIN, "options": {}, "pool": None, "kernels": "torch", "far": False}
        return replace(self, **own, block_size=block, runner="V1", asynchronous=False)


def mend() -> None:
    """On a CPU, plain vLLM 0.32 crashes on a long prompt of a Mamba-2 model, and gives requests without an adapter the
    last one; with our formats both are fixed."""
    from vllm_kvq.integration.patches.served.adapters import add_nothing_without
    from vllm_kvq.integration.patches.served.states import leave_checkpoints_out

    leave_checkpoints_out()
    add_nothing_without()


@dataclass(frozen=True)
class Case:
    setup: Setup
    traces: tuple[Trace, ...]

    def __post_init__(self) -> None:
        words, seeing = self.setup.arch.text().vocab_size, SEEING.get(self.setup.model)
        for trace in self.traces:
            if len({r.name for r in trace.requests}) < len(trace.requests):
                raise ValueError("two requests of a trace have the same name")
            for r in trace.requests:
                if max(r.prompt) >= words:
                    raise ValueError(f"request {r.name!r} has token {max(r.prompt)}; the model knows {words}")
                if r.pictures and not seeing:
                    raise ValueError(f"request {r.name!r} has pictures; only {', '.join(SEEING)} see them")
                if seeing and not seeing.shows(r):
                    a_picture = f"a picture is {seeing.tokens} times token {seeing.token}, and only pictures have it"
                    raise ValueError(f"the prompt of {r.name!r} is not one of {self.setup.model}: {a_picture}")
                if r.letters and seeing:
                    raise ValueError(f"request {r.name!r} has letters, which are not asked of models with images")
                if max(r.stop_token_ids, default=0) >= words:
                    raise ValueError(f"request {r.name!r} stops at a token that the model does not know")
                if r.adapter > ADAPTERS * self.setup.arch.adapter:
                    raise ValueError(f"request {r.name!r} has adapter {r.adapter}, which the model does not have")
                if len(r.prompt) + r.max_tokens > self.setup.max_len:
                    raise ValueError(f"request {r.name!r} may become longer than {self.setup.max_len} tokens")

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
    def from_json(cls, data: Any) -> Case:
        """The inverse of `to_json`; ValueError for anything else."""
        try:
            setup, traces = Setup(**data["setup"]), tuple(Trace.from_json(t) for t in data["traces"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a case ({type(error).__name__}: {error})") from error
        if not traces:
            raise ValueError("it has no trace")
        return cls(setup, ()).with_traces(traces)


def _short(trace: Trace) -> dict[str, Any]:
    """Without the fields of requests that have their defaults."""
    data = trace.to_json()
    usual = {"arrival": 0, "n": 1, "temperature": 0.0, "seed": None, "abort_after": None, "priority": 0, "adapter": 0}
    for request in data["requests"]:
        for name, value in [*usual.items(), ("stop", ()), ("stop_token_ids", ()), ("pictures", ()), ("letters", "")]:
            if request[name] == value:
                del request[name]
    return data
