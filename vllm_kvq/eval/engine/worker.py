"""One engine in its own process: vLLM's `LLM`, answering jobs from a pipe until it is closed.

vLLM's engine core runs in this same process, so logits need not cross another pipe, and whatever it prints goes to a
log whose end explains a failure.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

from vllm_kvq.eval.engine.jobs import Complete, Completed, EngineArguments, Generate, Score, Started
from vllm_kvq.eval.engine.logprobs import Logprobs

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # the engine is eager, but vLLM's sampler would still compile its own function in each process, for seconds
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def serve(pipe: Any, log: str, variables: Mapping[str, str], arguments: EngineArguments) -> None:
    """An answer is (True, the result) or (False, a sentence)."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.environ.clear()
    os.environ.update({**variables, **VARIABLES})
    if arguments.one_thread:
        import torch

        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        torch.set_num_threads(1)
    import tqdm

    # otherwise tqdm makes a semaphore that lives longer than the process
    tqdm.tqdm.set_lock(threading.RLock())
    # lists of millions of floats, which no cycle contains
    gc.disable()
    from vllm_kvq.integration.preview.dry_start import sentence_of

    try:
        engine = Engine(arguments)
        pipe.send((True, Started(engine.bits)))
        while True:
            pipe.send((True, engine.answer(pipe.recv())))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other side has closed
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send((False, sentence_of(error)))
    # the process exits here, without vLLM's own clean-up, which takes seconds
    os._exit(0)


class Engine:
    def __init__(self, arguments: EngineArguments) -> None:
        from vllm import LLM, EngineArgs

        from vllm_kvq.formats import FORMATS

        self.top, self.hits = arguments.top, arguments.hits
        chunk = {"max_num_batched_tokens": arguments.chunk} if arguments.chunk else {}
        engine: dict[str, Any] = {
            "model": arguments.model,
            "kv_cache_dtype": arguments.format,
            "dtype": arguments.dtype,
            "max_model_len": arguments.max_len,
            "max_num_seqs": arguments.requests,
            "max_logprobs": -1,
            "kv_cache_memory_bytes": arguments.cache_bytes,
            "enable_prefix_caching": arguments.hits,
            "enforce_eager": True,
            "skip_tokenizer_init": not arguments.text,
            "disable_log_stats": True,
            "logits_processors": ["vllm_kvq.eval.engine.forced:Forced"],
            **chunk,
        }
        if arguments.options:
            engine["additional_config"] = {"kvq": dict(arguments.options)}
        # refuses what can't be served, before weights load
        config = EngineArgs(**engine).create_engine_config()
        self.bits = {n: _bits(config, n, arguments.format in FORMATS) for n in arguments.lengths}
        self.llm = LLM(**engine)

    def answer(self, job: Score | Generate | Complete) -> Logprobs | list[Logprobs] | list[Completed]:
        if isinstance(job, Complete):
            return self.complete(job)
        return self.score(job) if isinstance(job, Score) else self.generate(job)

    def score(self, job: Score) -> Logprobs:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=self._kept, flat_logprobs=True, detokenize=False
        )
        (output,) = self.llm.generate([{"prompt_token_ids": list(job.tokens)}], params, use_tqdm=False)
        return Logprobs.of_flat(output.prompt_logprobs, self.top is None)

    def generate(self, job: Generate) -> list[Logprobs]:
        from vllm import SamplingParams

        from vllm_kvq.eval.engine.forced import ARGUMENT

        params = [
            SamplingParams(
                max_tokens=count,
                temperature=0,
                logprobs=self._kept,
                flat_logprobs=True,
                detokenize=False,
                ignore_eos=True,
                extra_args={ARGUMENT: list(forced)},
            )
            for count, forced in zip(job.counts, job.forced, strict=True)
        ]
        prompts = [{"prompt_token_ids": list(tokens)} for tokens in job.prompts]
        if self.hits:
            self.llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        if self.hits and not all(output.num_cached_tokens for output in outputs):
            raise ValueError("a prompt is too short to be found in the prefix cache; ask for a longer --context")
        return [Logprobs.of_flat(output.outputs[0].logprobs, self.top is None) for output in outputs]

    def complete(self, job: Complete) -> list[Completed]:
        from vllm import SamplingParams

        if job.shared:
            first = {"prompt_token_ids": list(job.prompts[0][: job.shared])}
            self.llm.generate([first], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        params = SamplingParams(max_tokens=job.most, temperature=0, stop=list(job.stop))
        prompts = [{"prompt_token_ids": list(tokens)} for tokens in job.prompts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        if job.shared and not all(output.num_cached_tokens for output in outputs):
            raise ValueError("what the prompts share is too short to be found in the prefix cache; make it longer")
        answers = [output.outputs[0] for output in outputs]
        return [Completed(a.text, len(a.token_ids), a.finish_reason == "length") for a in answers]

    @property
    def _kept(self) -> int:
        return -1 if self.top is None else self.top


def _bits(config: Any, tokens: int, ours: bool) -> float:
    from vllm_kvq.eval.bits import bits_at, plain_bits
    from vllm_kvq.integration.plan.plan import plan

    if ours:
        return bits_at(plan(config), tokens)
    return plain_bits(config.cache_config.cache_dtype, config.model_config.dtype)
