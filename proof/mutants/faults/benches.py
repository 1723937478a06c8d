"""Faults in benchmarks, and in the errors of synthetic data."""

from __future__ import annotations

from proof.mutants.fault import Fault

FIGURES = "tests/test_figures.py"
CAPACITY = "tests/test_bench_capacity.py -k 'not real'"
SERVER = "tests/test_bench_server.py"
GPU = "tests/cuda/test_gpu_scripts.py"

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
        "vllm_kvq/bench/servers/serve.py",
        "statistics.median(a.step / b.step",
        "statistics.median(b.step / a.step",
        FIGURES,
    ),
    Fault(
        "a warm first token is taken for a cold one",
        "vllm_kvq/bench/servers/serve.py",
        "(statistics.median(pair[i].first for pair in cold)",
        "(statistics.median(pair[i].first for pair in turns)",
        FIGURES,
    ),
    Fault(
        "idle moments of a load are counted as requests in flight",
        "vllm_kvq/bench/servers/capacity.py",
        "            if running:\n",
        "            if running >= 0:\n",
        CAPACITY,
    ),
    Fault(
        "answers that are cut short are a result",
        "vllm_kvq/bench/servers/capacity.py",
        'if said["total_output_tokens"] != load.requests * load.answer:',
        'if said["total_output_tokens"] > load.requests * load.answer:',
        CAPACITY,
    ),
    Fault(
        "a variable decides how much cache servers under a load have",
        "vllm_kvq/bench/servers/capacity.py",
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
        "a benchmark does not notice that its server died",
        "vllm_kvq/bench/servers/server.py",
        'server.raise_if_dead("while it was asked", DYING_SECONDS)',
        "pass",
        SERVER,
    ),
    Fault(
        "a server that does not answer ends in a traceback",
        "vllm_kvq/bench/servers/server.py",
        "except (ServerError, OSError, HTTPException) as error:",
        "except (ServerError, OSError) as error:",
        f"{SERVER} -k lives",
    ),
    Fault(
        "a load's failure has no log",
        "vllm_kvq/bench/servers/capacity.py",
        "    with watched(running):\n",
        "    with watched():\n",
        f"{SERVER} -k 'load or without_an_answer'",
    ),
    Fault(
        "requests are no longer counted after half an answer",
        "vllm_kvq/bench/servers/capacity.py",
        "except (OSError, HTTPException):",
        "except OSError:",
        f"{SERVER} -k counting",
    ),
    Fault(
        "an answer that ends early is timed",
        "vllm_kvq/bench/servers/serve.py",
        "if last < tokens:",
        "if last < 1:",
        f"{SERVER} -k early",
    ),
    Fault(
        "servers start for a model whose attention can't be measured",
        "vllm_kvq/bench/servers/serve.py",
        "    check(formats, model, load)\n",
        "",
        f"{FIGURES} -k refuses",
    ),
    Fault(
        "bf16 is compared with itself",
        "vllm_kvq/cli/bench/capacity.py",
        "if all(choice.format == capacity.PLAIN for choice in args.formats):",
        "if not args.formats:",
        f"{CAPACITY[:-1]} and bad_input'",
    ),
    Fault(
        "an engine whose parts refer to each other stays",
        "vllm_kvq/bench/decode.py",
        "        gc.collect()",
        "        pass",
        f"{FIGURES} -k engines",
    ),
    Fault(
        "a GPU's measurements start after the time for them",
        "vllm_kvq/bench/gpu/results.py",
        "if time.monotonic() >= self.deadline:",
        "if not self.deadline:",
        f"{GPU} -k seconds",
    ),
    Fault(
        "formats that were measured before are hidden when there is no time",
        "vllm_kvq/bench/gpu/table.py",
        """            except NoTime:
                continue
            tell(""",
        """            except NoTime:
                break
            tell(""",
        f"{GPU} -k before",
    ),
    Fault(
        "a figure is drawn of whatever is named like a GPU",
        "bench/gpu.sh",
        "grep -slx 'torch,what,batch,context,seconds,read'",
        "grep -sl ''",
        f"{GPU} -k figure_is",
    ),
    Fault(
        "a size's g is read as G",
        "vllm_kvq/cli/arguments.py",
        '"g": 10**9',
        '"g": 1 << 30',
        "tests/engine/test_plan.py -k sizes",
    ),
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
    Fault(
        "bench gpu --compile --json says nothing",
        "vllm_kvq/cli/bench/gpu.py",
        'console.show_json({"device": name, "compiled": names})',
        "pass",
        "tests/cuda/test_gpu_scripts.py -k compiled_is_a_document",
    ),
    Fault(
        "an answer without a token is one that took no time",
        "vllm_kvq/bench/servers/serve.py",
        'raise ServerError("the server answered without a token")',
        "return Turn(0.0, 0.0)",
        "tests/test_bench_server.py -k ends_early",
    ),
    Fault(
        "an error in the middle of an answer is no token",
        "vllm_kvq/bench/servers/serve.py",
        "raise ServerError(f\"the server answered: {line[6:306].decode(errors='replace').strip()}\") from None",
        "return 0",
        "tests/test_bench_server.py -k ends_early",
    ),
    Fault(
        "no memory at all is a size",
        "vllm_kvq/cli/arguments.py",
        "if nbytes < 1:",
        "if nbytes < 0:",
        "tests/engine/test_plan.py -k 'said_of_sizes or bad_input'",
    ),
)
