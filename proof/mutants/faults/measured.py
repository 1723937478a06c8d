"""Faults in what measures formats: statistics, the reading regime, conformance, servers under a load, and pages."""

from __future__ import annotations

from proof.mutants.fault import Fault

EVAL = "vllm_kvq/eval"
STATISTICS = "tests/eval/test_statistics.py -k"
RESULTS = "tests/eval/test_results.py -k"
READING = "tests/eval/test_reading.py -k"
CONFORMANCE = "tests/eval/test_conformance.py -k"
CAPACITY = "tests/test_bench_capacity.py -k"
REPORTS = "tests/test_bench_reports.py -k"
PAGES = "tests/test_result_pages.py -k"

FIGURES = (
    Fault(
        "the usual baseline is whatever comes first",
        f"{EVAL}/results/statistics.py",
        "next((row.label for row in rows if row.format == FP8), rows[0].label)",
        "rows[0].label",
        f"{STATISTICS} usual_baseline",
    ),
    Fault(
        "claims of all regimes are adjusted together",
        f"{EVAL}/results/statistics.py",
        "tables.setdefault((row.regime, row.task, row.context), [])",
        'tables.setdefault(("", row.task, row.context), [])',
        f"{STATISTICS} other_tables",
    ),
    Fault(
        "a claim draws other texts each time",
        f"{EVAL}/results/statistics.py",
        "np.random.default_rng(seed)",
        "np.random.default_rng()",
        f"{STATISTICS} same_claim",
    ),
    Fault(
        "a quantile weighs numbers by other sequences",
        f"{EVAL}/results/measures.py",
        "values.value[order], values.index[order],",
        "values.value[order], values.index,",
        "tests/eval/test_measures.py -k quantiles_interval",
    ),
    Fault(
        "a curve leaves its last number out",
        f"{EVAL}/results/measures.py",
        "(along <= end) if i == last",
        "(along < end) if i == last",
        "tests/eval/test_measures.py -k curves",
    ),
    Fault(
        "curves over steps are not read back",
        f"{EVAL}/results/result.py",
        'for curves in ("by_position", "by_depth", "by_steps"):',
        'for curves in ("by_position", "by_depth"):',
        f"{RESULTS} saved_is_loaded",
    ),
    Fault(
        "an interval without an end can't be saved",
        f"{EVAL}/results/result.py",
        "isinstance(value, float) and not math.isfinite(value)",
        "isinstance(value, float) and math.isnan(value)",
        f"{RESULTS} without_an_end",
    ),
    Fault(
        "a row has the claims of other lengths",
        f"{EVAL}/results/report.py",
        "if (c.label, c.regime, c.task, c.context) == about]",
        "if (c.label, c.regime, c.task) == about[:3]]",
        f"{RESULTS} rows_claims",
    ),
    Fault(
        "percentiles are there whatever lies beyond them",
        f"{EVAL}/run/rows.py",
        "len(kl.value) * (1 - q) >= BEYOND",
        "len(kl.value) * q >= BEYOND",
        f"{READING} percentile",
    ),
)
READ = (
    Fault(
        "readers cross a boundary of pages together",
        f"{EVAL}/reading/attention.py",
        "(begin // TOGETHER + 1) * TOGETHER)",
        "begin + TOGETHER)",
        f"{READING} decode_step_would",
    ),
    Fault(
        "keys are read as late as values",
        f"{EVAL}/reading/attention.py",
        "return boundary(self.unit, self.key_window, position),",
        "return boundary(self.unit, self.window, position),",
        f"{READING} decode_step_would",
    ),
    Fault(
        "a format's window of keys is that of its values",
        f"{EVAL}/reading/attention.py",
        "page.S, page.unit, page.W, page.W_keys)",
        "page.S, page.unit, page.W, page.W)",
        f"{READING} both_windows",
    ),
    Fault(
        "fp8 is the one with fewer digits",
        f"{EVAL}/reading/caches.py",
        "x.clamp(-top, top).to(torch.float8_e4m3fn)",
        "x.clamp(-top, top).to(torch.float8_e5m2)",
        f"{READING} fp8",
    ),
    Fault(
        "the exact cache is in float32",
        f"{EVAL}/reading/reader.py",
        "            key, value = (x.to(self.dtype).float() for x in (key, value))\n",
        "            key, value = (x.float() for x in (key, value))\n",
        f"{READING} rounded",
    ),
    Fault(
        "a model whose attention does more is read",
        f"{EVAL}/reading/reader.py",
        "if not (ours - theirs).abs().max() <= NEAR * theirs.std():",
        "if not (ours - theirs).isfinite().all():",
        f"{READING} not_the_models",
    ),
    Fault(
        "layers that read no cache of ours are overlooked",
        f"{EVAL}/reading/reader.py",
        "if run.asked != set(range(self.layers)):",
        "if not run.asked:",
        f"{READING} not_the_models",
    ),
    Fault(
        "the exact cache's best token is taken for the format's",
        f"{EVAL}/run/reading.py",
        "best = found.argmax(-1)",
        "best = exact.argmax(-1)",
        f"{READING} as_all_others",
    ),
    Fault(
        "figures of fewer readers are taken for those of more",
        f"{EVAL}/run/plan.py",
        "                readers=self.reading(item),\n",
        "",
        f"{READING} number_of_readers",
    ),
)
CONFORM = (
    Fault(
        "a format may read back any finite number",
        f"{EVAL}/conformance/checks.py",
        "if x.abs().max() > 4 * LIMIT:",
        "if x.abs().max() > math.inf:",
        f"{CONFORMANCE} named[Grows]",
    ),
    Fault(
        "kernels may answer NaN",
        f"{EVAL}/conformance/checks.py",
        "if not error <= ATTENTION_BOUND:",
        "if error > ATTENTION_BOUND:",
        f"{CONFORMANCE} answer_nan",
    ),
    Fault(
        "checks go on that make no sense any more",
        f"{EVAL}/conformance/report.py",
        "            if check.stops:\n",
        "            if check.stops and not faults:\n",
        f"{CONFORMANCE} 'named[Missing] or named[Transposed]'",
    ),
    Fault(
        "conformance fits constants to what it packs",
        f"{EVAL}/conformance/trial.py",
        "rope=True, seed=1)))",
        "rope=True)))",
        f"{CONFORMANCE} other_tokens",
    ),
)
SHOWN = (
    Fault(
        "a load's prompts are those of seed 0",
        "vllm_kvq/bench/servers/capacity.py",
        '"--seed", str(load.seed)]',
        '"--seed", "0"]',
        f"{CAPACITY} has_a_seed",
    ),
    Fault(
        "clients open all requests at once",
        "vllm_kvq/bench/servers/capacity.py",
        '"--max-concurrency", str(load.concurrency)',
        '"--max-concurrency", str(load.requests)',
        f"{CAPACITY} has_a_seed",
    ),
    Fault(
        "of several engines the last one counts",
        "vllm_kvq/bench/servers/capacity.py",
        "found.get(match[1], 0.0) + float(match[2])",
        "float(match[2])",
        f"{CAPACITY} added_up",
    ),
    Fault(
        "bars show how many more requests bf16 has",
        "vllm_kvq/cli/bench/capacity.py",
        "r.in_flight / plain.in_flight",
        "plain.in_flight / r.in_flight",
        f"{REPORTS} test_capacity",
    ),
    Fault(
        "a benchmark's page has the line of another process",
        "vllm_kvq/cli/bench/report.py",
        "command(self.prog, arguments), facts, of)",
        "command(self.prog, None), facts, of)",
        f"{REPORTS} 'are_written and capacity'",
    ),
    Fault(
        "a page knows no package by its second name",
        "vllm_kvq/cli/page/made.py",
        "            continue\n",
        "            break\n",
        f"{PAGES} another_name",
    ),
    Fault(
        "a page's contents lead nowhere",
        "vllm_kvq/cli/page/document.py",
        "for i, part in enumerate(section.parts, 1) if not isinstance(part, str)]",
        "for i, part in enumerate([p for p in section.parts if not isinstance(p, str)], 1)]",
        f"{PAGES} 'valid and benched'",
    ),
    Fault(
        "a page's first column of numbers is text",
        "vllm_kvq/cli/page/tree.py",
        "if column >= of.right else {}",
        "if column > of.right else {}",
        f"{PAGES} aligned",
    ),
    Fault(
        "a page shows its first plots twice",
        "vllm_kvq/cli/eval/page.py",
        "others = [picture for picture in drawn or () if picture not in first]",
        "others = [*(drawn or ())]",
        f"{PAGES} 'every_table and evaluated'",
    ),
)

FAULTS: tuple[Fault, ...] = (*FIGURES, *READ, *CONFORM, *SHOWN)
