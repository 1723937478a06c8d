"""Faults in what shows results of evaluations and benchmarks, in what measures single heads and writes key biases."""

from __future__ import annotations

from proof.mutants.fault import Fault

BIASES = "tests/instruments/demo/test_biases.py"
HEADS = "tests/eval/heads/test_heads.py"
ASSIGN = "tests/eval/heads/test_assign.py"
VIEWS = "tests/eval/results/test_views.py"
LM_EVAL = "tests/eval/test_lm_eval.py"
PAGE = "tests/commands/test_result_pages.py"
BENCH = "tests/commands/test_bench_reports.py"
NAMING = "tests/commands/test_naming.py"


def _eval(about: str, name: str, old: str, new: str, tests: str) -> Fault:
    file, *function = name.split("::")
    return Fault(about, "::".join((f"vllm_kvq/{file}.py", *function)), old, new, tests)


def _biases(about: str, function: str, old: str, new: str) -> Fault:
    return Fault(about, f"proof/demo/biases.py::{function}", old, new, BIASES)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "prompts of the regime hits run once, and hit nothing",
        "vllm_kvq/eval/engine/worker.py::Engine.generate",
        "self.llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)",
        "pass",
        "tests/eval/run/test_evaluation.py -k hits_are_measured",
        slow=True,
    ),
    _biases("queries are scaled with their keys", "_Head.scale_pair", "rows[:, row] /= scale", "rows[:, row] *= scale"),
    _biases("a pair is two neighbours", "_Head.scale_pair", "(pair, pair + self.d // 2)", "(pair, pair + 1)"),
    _biases("one query head of a group is scaled", "_Head._rows", 'self.group if projection == "q" else 1', "1"),
    _biases("wide channels that no query reads", "_scale_keys", "if i not in masked and", "if i in masked and"),
    _biases("a pair that the second query head reads", "masked_pairs", "[head].sum((0, 1))", "[head][0].sum(0)"),
    _biases("scales that bfloat16 rounds", "_power_of_two", "round(math.log2(x))", "1.5 * round(math.log2(x))"),
    _biases("biases that ignore the size of keys", "rewritten", "bias * median", "bias"),
    _eval("the window is packed", "eval/heads/heads::as_cached", "(len(key) - window)", "len(key)", HEADS),
    _eval(
        "sinks are packed",
        "eval/heads/heads::as_cached",
        "hat[page.S : end] = x[page.S : end]",
        "hat[:end] = x[:end]",
        HEADS,
    ),
    _eval("the prompt's own queries read", "eval/heads/heads::layer_errors", "context:", ":context", HEADS),
    _eval(
        "fitted only to what is packed",
        "eval/heads/heads::as_cached",
        "key,",
        "key[: max(ends)],",
        HEADS,
    ),
    _eval(
        "keys before RoPE are keys after it",
        "eval/heads/heads::bound",
        "replace(geometry, rope=captured.rope)",
        "geometry",
        HEADS,
    ),
    _eval(
        "constants of another calibration",
        "eval/heads/capture::Captured",
        "init=False,",
        "",
        HEADS,
    ),
    _eval("constants for other options", "eval/heads/capture::Captured.calibrated", "page.settings", "None", HEADS),
    _eval("any pairing of channels", "eval/heads/heads::bound", "pairing=captured.pairing,", "", HEADS),
    _eval("the best layers stay in 16 bits", "eval/heads/assign::servable", "-errors", "errors", ASSIGN),
    _eval("more than the budget", "eval/heads/assign::best", "= budget", "= budget + 1", ASSIGN),
    _eval(
        "a frontier of the worst",
        "eval/results/frontier::best",
        "<",
        ">",
        VIEWS,
    ),
    _eval("peers look like ours", "eval/results/frontier::frontier", '"s" if peer else "o"', '"o"', VIEWS),
    _eval("more names than can be read", "eval/results/frontier", "MOST_NAMES = 8", "MOST_NAMES = 80", VIEWS),
    _eval("names for what nobody asks for", "eval/results/frontier::asked_for", "5", "0", f"{VIEWS} -k names"),
    _eval(
        "a name hides another",
        "naming::name_points.cost",
        "5 * sum(_common(there, other) for j, other in written.items() if j != i)",
        "0",
        NAMING,
    ),
    _eval("a name is struck through", "naming::name_points", "taken += _along_lines(axes, 2 * scale)", "pass", NAMING),
    _eval("a name next to another point", "naming::name_points.cost", "60", "0", NAMING),
    _eval(
        "all heads in one column",
        "eval/results/plots::heat_map",
        "[e.head]",
        "[0]",
        VIEWS,
    ),
    _eval("a token's line ends as they are", "cli/eval/hurt::around", "_line(hurt.before)", "hurt.before", VIEWS),
    _eval(
        "a page's pictures share their names",
        "cli/page/tree::_own",
        'f"{name}-{value}"',
        "value",
        f"{PAGE} -k valid",
    ),
    _eval("a page may load what it likes", "cli/page/document", "default-src 'none'; ", "", f"{PAGE} -k loads"),
    _eval(
        "a page forgets which token was hurt",
        "cli/page/tree::_cells",
        'element("mark", {}, token)',
        "token",
        f"{PAGE} -k escaped",
    ),
    _eval(
        "a benchmark's plot has all curves", "bench/figures", "MOST_CURVES = 8", "MOST_CURVES = 80", f"{BENCH} -k eight"
    ),
    _eval(
        "names of curves cover each other",
        "drawing::apart",
        "len(groups) > 1",
        "False",
        f"{BENCH} -k cover",
    ),
    _eval(
        "what is far slower than bf16 is drawn without it",
        "bench/figures::_bars",
        'axes.axvline(1, color="black", linewidth=0.8)',
        "",
        f"{BENCH} -k slower_than",
    ),
    _eval(
        "a GPU's plot is upside down",
        "bench/gpu/kept::Kept.panels",
        "bf16 / step.seconds",
        "seconds / step.bf16",
        f"{BENCH} -k gpu",
    ),
    _eval(
        "a page of a GPU mixes torches",
        "bench/gpu/kept::Kept.of",
        "== rows[-1].torch",
        "",
        f"{BENCH} -k newest_torch",
    ),
    _eval(
        "a GPU's page compares with the slowest kernel",
        "bench/gpu/kept::Kept.steps",
        "min",
        "max",
        f"{BENCH} -k were_printed",
    ),
    _eval(
        "a prompt's plot forgets packing",
        "cli/bench/prefill::plot",
        "100 * (row.fit_share + row.pack_share)",
        "100 * row.fit_share",
        f"{BENCH} -k prompts",
    ),
    _eval(
        "a benchmark's page does not say why it has no plot",
        "cli/bench/report::Report.page",
        "[NO_PLOT] if drawn is None else drawn",
        "drawn or []",
        f"{BENCH} -k 'matplotlib and decode'",
    ),
    _eval(
        "a benchmark writes a report that nobody asked for",
        "cli/bench/serve::main",
        "out or",
        "out = args.out or",
        f"{BENCH} -k 'without_out and serve'",
    ),
    _eval("one standard error for 95 %", "eval/lm_tasks::rows", "NORMAL * error,", "error,", f"{LM_EVAL} -k figure"),
    _eval(
        "kept whatever the options were",
        "cli/eval/lm_eval::_kept",
        "options=dict(choice.options),",
        "",
        LM_EVAL,
    ),
)
