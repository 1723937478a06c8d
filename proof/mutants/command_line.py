"""Faults in what users meet first: commands, the sentence about slow formats, servers that use none of ours."""

from __future__ import annotations

from proof.mutants.fault import Fault

CLI = "tests/test_cli.py"
CHECK_ALL = "tests/engine/test_check_all.py"
CHECK = "tests/engine/test_check.py -k 'not process and not verbose'"
DOCTOR = "tests/engine/test_doctor.py"
BUDGET = "vllm_kvq/integration/preview/budget.py"
PLAN = "tests/engine/test_plan.py tests/engine/test_capacity.py -k 'not real'"
PLAIN = "tests/engine/test_plain_server.py"
PLATFORM = "vllm_kvq/integration/platform.py"
SLOW = "tests/kernels/test_slow.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a slow half of a format is not said",
        "vllm_kvq/kernels/cpu/slow.py",
        "for half in HALVES if half not in fast}",
        "for half in HALVES[:1] if half not in fast}",
        SLOW,
    ),
    Fault(
        "outliers by slab are not said to be slow",
        "vllm_kvq/kernels/cpu/slow.py",
        'fmt.settings.get("outlier_choice") == "slab"',
        'fmt.settings.get("outlier_choice") == "slabs"',
        SLOW,
    ),
    Fault(
        "an option is blamed that does not matter",
        "vllm_kvq/kernels/cpu/slow.py",
        "for names in (*((name,) for name in changed), changed):",
        "for names in (changed,):",
        SLOW,
    ),
    Fault(
        "the option to blame is sought with other sinks than the user's",
        "vllm_kvq/kernels/blame.py",
        "if value is not None}\n    default",
        "if name == ''}\n    default",
        "tests/kernels/test_paths.py -k to_blame",
    ),
    Fault(
        "the head size is blamed for an option",
        "vllm_kvq/kernels/cpu/slow.py",
        "        if _fast(fmt, half, chosen | kept | others):",
        "        if not names:",
        SLOW,
    ),
    Fault(
        "float32 values pass for integer ones",
        "csrc/cpu/attend/float32/table.h",
        "return {value_bytes, add, false};",
        "return {value_bytes, add, true};",
        SLOW,
        slow=True,
    ),
    Fault(
        "the path does not say what is slow",
        "vllm_kvq/kernels/paths.py",
        "or None, slow_on_cpu.slow(fmt))",
        "or None)",
        SLOW,
    ),
    Fault(
        "the path does not say that a subspace is slow on a GPU",
        "vllm_kvq/kernels/paths.py",
        ", slow=slow_on_gpu.slow(fmt))",
        ")",
        "tests/kernels/test_paths.py -k slow_prompts",
    ),
    Fault(
        "the server does not say what is slow",
        "vllm_kvq/integration/worker/report.py",
        "return why + ([path.slow] if path.slow is not None else [])",
        "return why",
        "tests/engine/test_served.py -k said_at_start",
    ),
    Fault(
        "a slow option is not timed",
        "vllm_kvq/bench/slow.py",
        '    ("polar4", {"angle_bits": 2}),\n',
        "",
        SLOW,
    ),
    Fault(
        "a group without a command is not wrong usage",
        "vllm_kvq/cli/__init__.py",
        "    return console.USAGE",
        "    return console.DONE",
        CLI,
    ),
    Fault(
        "test formats are listed",
        "vllm_kvq/formats/table.py",
        "for fmt in FORMATS.values() if fmt.public]",
        "for fmt in FORMATS.values()]",
        CLI,
    ),
    Fault(
        "vLLM's help lists test formats",
        "vllm_kvq/integration/patches/registry.py",
        "    dtypes.HIDDEN,\n",
        "",
        CHECK,
    ),
    Fault(
        "check's exit code is always 0",
        "vllm_kvq/cli/check/one.py",
        'return console.DONE if found["starts"] else console.FOUND',
        "return console.DONE",
        CHECK,
    ),
    Fault(
        "check ignores the memory that is there",
        "vllm_kvq/integration/preview/description.py",
        "checkpoint_problem(config) or memory.problem",
        "checkpoint_problem(config)",
        CHECK,
    ),
    Fault(
        "check takes a folder without weights",
        "vllm_kvq/integration/preview/description.py",
        "checkpoint_problem(config) or memory.problem",
        "memory.problem",
        f"{CHECK} -k missing",
    ),
    Fault(
        "check counts the cache without the weights",
        "vllm_kvq/integration/preview/checkpoint.py",
        "weights + ranks * cache_bytes",
        "ranks * cache_bytes",
        f"{CHECK} -k weights",
    ),
    Fault(
        "check believes that any request fits",
        "vllm_kvq/integration/preview/description.py",
        "blocks <= capacity.per_request",
        "blocks < 0",
        CHECK,
    ),
    Fault(
        "check ranks the formats by nothing",
        "vllm_kvq/cli/check/every.py",
        "last if fmt.usual is None else fmt.usual",
        "last",
        CHECK_ALL,
    ),
    Fault(
        "check takes losses from the wrong kind of model",
        "vllm_kvq/integration/advice/losses.py",
        "(m.key_biases != key_biases, ",
        "(m.key_biases == key_biases, ",
        CHECK_ALL,
    ),
    Fault(
        "check says a reason that all formats share for each",
        "vllm_kvq/cli/check/every.py",
        "len(problems) == 1",
        "not problems",
        CHECK_ALL,
    ),
    Fault(
        "check's sentence has pydantic's words around it",
        "vllm_kvq/integration/preview/dry_start.py",
        "raise WouldNotStart(sentence_of(error)) from error",
        "raise WouldNotStart(str(error)) from error",
        CHECK,
    ),
    Fault(
        "check serves whatever --kv-cache-dtype says",
        "vllm_kvq/integration/preview/dry_start.py",
        "if budget is None and args.kv_cache_dtype not in FORMATS:",
        "if budget is None and args.kv_cache_dtype is None:",
        CHECK,
    ),
    Fault(
        "doctor's exit code is always 0",
        "vllm_kvq/cli/doctor.py",
        "return console.FOUND if bad else console.DONE",
        "return console.DONE",
        DOCTOR,
    ),
    Fault(
        "doctor lists patches of other versions",
        "vllm_kvq/integration/preview/environment.py",
        "for patch in registry.PATCHES if patch.of_this_vllm]",
        "for patch in registry.PATCHES]",
        DOCTOR,
    ),
    Fault(
        "doctor compiles",
        "vllm_kvq/integration/preview/environment.py",
        "        path = build.built()\n        if path is None:",
        "        path = build.build()\n        if path is None:",
        DOCTOR,
    ),
    Fault(
        "bench asks vLLM for an fp8 cache that it does not have",
        "vllm_kvq/bench/vllm_build.py",
        "    if head_size % 32:",
        "    if head_size % 16:",
        "tests/test_bench.py -k no_fp8_cache",
    ),
    Fault(
        "a plan gives each stage of a pipeline all layers",
        BUDGET,
        "wanted.cache_bytes * wanted.stages // size",
        "wanted.cache_bytes // size",
        PLAN,
    ),
    Fault(
        "a token of a plan has the bytes of all ranks",
        BUDGET,
        "token_bytes=request / wanted.context",
        "token_bytes=need.first / wanted.context",
        "tests/engine/test_plan.py -k ranks_share_heads",
    ),
    Fault(
        "a plan is wider than a terminal",
        "vllm_kvq/cli/plan.py",
        'f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"',
        'f"{value:,.2f}"',
        "tests/engine/test_plan.py -k fits_the_terminal",
    ),
    Fault("a plan hands out vLLM's own block", BUDGET, "NULL_BLOCK * size)", "0)", PLAN),
    Fault(
        "windows of a plain cache never free anything",
        BUDGET,
        "first - (freed - fixed * freed_blocks) * bits // 16",
        "first",
        PLAN,
    ),
    Fault(
        "a plan puts all weights on each GPU",
        BUDGET,
        "model.nbytes // ranks - OVERHEAD",
        "model.nbytes - OVERHEAD",
        PLAN,
    ),
    Fault(
        "a Qwen2 whose weights are not here has no key biases",
        "vllm_kvq/integration/advice/losses.py",
        "usually_biased(vllm_config)",
        "False",
        PLAN,
    ),
    Fault(
        "a server without our formats gets our backend",
        PLATFORM,
        "        if not ours(current):\n            return None\n        check_other_layer",
        "        check_other_layer",
        PLAIN,
        slow=True,
    ),
    Fault(
        "a server without our formats gets patches of theirs",
        PLATFORM,
        "    if ours(vllm_config) and vllm_config.model_config is not None:\n        apply(",
        "    registry.install(Moment.CONFIGURED, vllm_config)\n    if ours(vllm_config):\n        apply(",
        PLAIN,
        slow=True,
    ),
)
