"""Faults in benchmarks, and in the errors of synthetic data."""

from __future__ import annotations

from proof.mutants.fault import Fault

FIGURES = "tests/test_figures.py"
CAPACITY = "tests/test_bench_capacity.py -k 'not real'"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "bench's ratio is upside down",
        "vllm_kvq/bench/timing.py",
        "statistics.median(b / t for",
        "statistics.median(t / b for",
        FIGURES,
    ),
    Fault(
        "bench's times are those of the best round",
        "vllm_kvq/bench/timing.py",
        "middle = statistics.median(times[name])",
        "middle = min(times[name])",
        FIGURES,
    ),
    Fault(
        "the limit of a ratio is upside down",
        "vllm_kvq/bench/timing.py",
        "candidates[base].nbytes / candidate.nbytes",
        "candidate.nbytes / candidates[base].nbytes",
        "tests/test_figures.py -k times_as_fast",
    ),
    Fault(
        "bench reads one cache that fits the processor's",
        "vllm_kvq/bench/steps.py",
        "-(-2 * last_level_cache() // nbytes)",
        "1",
        "tests/test_figures.py -k exceed",
    ),
    Fault("a copy's bytes are counted once", "vllm_kvq/bench/timing.py", "2 * len(source) /", "len(source) /", FIGURES),
    Fault("decoding counts its prompt", "vllm_kvq/bench/decode.py", " - _seconds(llm, prompts, 1)", "", FIGURES),
    Fault(
        "decode's exit status",
        "vllm_kvq/cli/bench/decode.py",
        "return console.FOUND if slow else console.DONE",
        "return console.DONE",
        FIGURES,
    ),
    Fault(
        "serve's ratio is upside down",
        "vllm_kvq/bench/serve.py",
        "statistics.median(a.step / b.step",
        "statistics.median(b.step / a.step",
        FIGURES,
    ),
    Fault(
        "a warm first token is taken for a cold one",
        "vllm_kvq/bench/serve.py",
        "(statistics.median(pair[i].first for pair in cold)",
        "(statistics.median(pair[i].first for pair in turns)",
        FIGURES,
    ),
    Fault(
        "idle moments of a load are counted as requests in flight",
        "vllm_kvq/bench/capacity.py",
        "            if running:\n",
        "            if running >= 0:\n",
        CAPACITY,
    ),
    Fault(
        "answers that are cut short are a result",
        "vllm_kvq/bench/capacity.py",
        'if said["total_output_tokens"] != load.requests * load.answer:',
        'if said["total_output_tokens"] > load.requests * load.answer:',
        CAPACITY,
    ),
    Fault(
        "a variable decides how much cache servers under a load have",
        "vllm_kvq/bench/capacity.py",
        ', without=["VLLM_CPU_KVCACHE_SPACE"])',
        ")",
        CAPACITY,
    ),
    Fault(
        "tokens per second are compared the wrong way round",
        "vllm_kvq/cli/bench/capacity.py",
        "row.tokens_per_second / plain.tokens_per_second",
        "plain.tokens_per_second / row.tokens_per_second",
        CAPACITY,
    ),
    Fault(
        "a chunk's ratio is upside down",
        "vllm_kvq/bench/prefill.py",
        "statistics.median(a / b for a, b",
        "statistics.median(b / a for a, b",
        FIGURES,
    ),
    Fault("a GPU's ratio is upside down", "vllm_kvq/bench/gpu/table.py", "{x / took:.2f}", "{took / x:.2f}", FIGURES),
    Fault(
        "errors of queries that were fitted",
        "vllm_kvq/cli/eval/error.py",
        "score_error(new, key",
        "score_error(seen, key",
        FIGURES,
    ),
    Fault(
        "errors relative to the wrong scores",
        "vllm_kvq/eval/heads/synthetic.py",
        "/ exact.norm()",
        "/ scores(query, key_hat).norm()",
        FIGURES,
    ),
)
