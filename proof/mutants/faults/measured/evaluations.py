"""Faults in what measures formats: statistics, the reading regime, conformance, servers under a load, and pages."""

from __future__ import annotations

from proof.mutants.fault import Fault

EVAL = "vllm_kvq/eval"
STATISTICS = "tests/eval/results/test_statistics.py -k"
RESULTS = "tests/eval/results/test_results.py -k"
READING = "tests/eval/reading/test_reading.py -k"
CONFORMANCE = "tests/eval/test_conformance.py -k"
CAPACITY = "tests/commands/test_bench_capacity.py -k"
REPORTS = "tests/commands/test_bench_reports.py -k"
PAGES = "tests/commands/test_result_pages.py -k"

FIGURES = (
    Fault(
        "more tokens are asked for than a text continues by, and nobody says so",
        "vllm_kvq/cli/eval/model.py::too_many_tokens",
        "args.tokens <= room",
        "room",
        "tests/eval/run/test_eval_command.py -k wrong_usage",
    ),
    Fault(
        "the usual baseline is whatever comes first",
        f"{EVAL}/results/statistics.py::usual_baseline",
        "next((row.label for row in rows if row.format == FP8), rows[0].label)",
        "rows[0].label",
        f"{STATISTICS} usual_baseline",
    ),
    Fault(
        "claims of all regimes are adjusted together",
        f"{EVAL}/results/statistics.py::claims",
        "row.regime",
        '""',
        f"{STATISTICS} other_tables",
    ),
    Fault(
        "a claim draws other texts each time",
        f"{EVAL}/results/statistics.py::Paired.of",
        "(seed)",
        "()",
        f"{STATISTICS} same_claim",
    ),
    Fault(
        "a quantile weighs numbers by other sequences",
        f"{EVAL}/results/measures.py::quantile",
        "index[order]",
        "index",
        "tests/eval/results/test_measures.py -k quantiles_interval",
    ),
    Fault(
        "a curve leaves its last number out",
        f"{EVAL}/results/measures.py::curve",
        "<=",
        "<",
        "tests/eval/results/test_measures.py -k curves",
    ),
    Fault(
        "curves over steps are not read back",
        f"{EVAL}/results/result.py::Row.of",
        ', "by_steps"',
        "",
        f"{RESULTS} saved_is_loaded",
    ),
    Fault(
        "an interval without an end can't be saved",
        f"{EVAL}/results/result.py::_without_nan",
        "not math.isfinite",
        "math.isnan",
        f"{RESULTS} without_an_end",
    ),
    Fault(
        "a row has the claims of other lengths",
        f"{EVAL}/results/report.py::claims_of",
        "if (c.label, c.regime, c.task, c.context) == about]",
        "if (c.label, c.regime, c.task) == about[:3]]",
        f"{RESULTS} rows_claims",
    ),
    Fault(
        "percentiles are there whatever lies beyond them",
        f"{EVAL}/run/rows.py::_likeness",
        "(1 - q)",
        "q",
        f"{READING} percentile",
    ),
)
READ = (
    Fault(
        "readers cross a boundary of pages together",
        f"{EVAL}/reading/attention.py::runs",
        "(begin // TOGETHER + 1) *",
        "begin +",
        f"{READING} decode_step_would",
    ),
    Fault(
        "keys are read as late as values",
        f"{EVAL}/reading/attention.py::Packed.ends",
        "key_window",
        "window",
        f"{READING} decode_step_would",
    ),
    Fault(
        "a format's window of keys is that of its values",
        f"{EVAL}/reading/attention.py::Packed.of",
        "W_keys",
        "W",
        f"{READING} both_windows",
    ),
    Fault(
        "fp8 is the one with fewer digits",
        f"{EVAL}/reading/caches.py::fp8",
        "to(torch.float8_e4m3fn)",
        "to(torch.float8_e5m2)",
        f"{READING} fp8",
    ),
    Fault(
        "the exact cache is in float32",
        f"{EVAL}/reading/reader.py::_Pass.attend",
        "to(self.dtype).",
        "",
        f"{READING} rounded",
    ),
    Fault(
        "a model whose attention does more is read",
        f"{EVAL}/reading/reader.py::Reader._check",
        "abs().max() <= NEAR * theirs.std",
        "isfinite().all",
        f"{READING} not_the_models",
    ),
    Fault(
        "layers that read no cache of ours are overlooked",
        f"{EVAL}/reading/reader.py::Reader._check",
        "if run.asked != set(range(self.layers)):",
        "if not run.asked:",
        f"{READING} not_the_models",
    ),
    Fault(
        "the exact cache's best token is taken for the format's",
        f"{EVAL}/run/reading.py::compared",
        "= found",
        "= exact",
        f"{READING} as_all_others",
    ),
    Fault(
        "figures of fewer readers are taken for those of more",
        f"{EVAL}/run/plan.py::Plan.key",
        "readers=self.reading(item),",
        "",
        f"{READING} number_of_readers",
    ),
)
CONFORM = (
    Fault(
        "a format may read back any finite number",
        f"{EVAL}/conformance/checks.py::finite",
        "4 * LIMIT",
        "math.inf",
        f"{CONFORMANCE} named[Grows]",
    ),
    Fault(
        "kernels may answer NaN",
        f"{EVAL}/conformance/checks.py::attention",
        "not error <=",
        "error >",
        f"{CONFORMANCE} answer_nan",
    ),
    Fault(
        "checks go on that make no sense any more",
        f"{EVAL}/conformance/report.py::conform",
        "stops",
        "stops and not faults",
        f"{CONFORMANCE} 'named[Missing] or named[Transposed]'",
    ),
    Fault(
        "conformance fits constants to what it packs",
        f"{EVAL}/conformance/trial.py::Trial.of",
        ", seed=1",
        "",
        f"{CONFORMANCE} other_tokens",
    ),
)
SHOWN = (
    Fault(
        "a load's prompts are those of seed 0",
        "vllm_kvq/bench/servers/capacity.py::load_command",
        "str(load.seed)",
        '"0"',
        f"{CAPACITY} has_a_seed",
    ),
    Fault(
        "clients open all requests at once",
        "vllm_kvq/bench/servers/capacity.py::load_command",
        ".concurrency",
        ".requests",
        f"{CAPACITY} has_a_seed",
    ),
    Fault(
        "of several engines the last one counts",
        "vllm_kvq/bench/servers/capacity.py::read_metrics",
        "found.get(match[1], 0.0) +",
        "",
        f"{CAPACITY} added_up",
    ),
    Fault(
        "a picture has a load's requests and tokens the wrong way round",
        "vllm_kvq/cli/bench/capacity.py::plot",
        "(row.in_flight, row.tokens_per_second)",
        "(row.tokens_per_second, row.in_flight)",
        f"{REPORTS} test_capacity",
    ),
    Fault(
        "a benchmark's page has the line of another process",
        "vllm_kvq/cli/bench/report.py::Report.write",
        "prog, arguments",
        "prog, None",
        f"{REPORTS} 'are_written and capacity'",
    ),
    Fault(
        "a page knows no package by its second name",
        "vllm_kvq/cli/page/made.py::installed",
        "continue",
        "break",
        f"{PAGES} another_name",
    ),
    Fault(
        "a page's contents lead nowhere",
        "vllm_kvq/cli/page/document.py::_contents",
        "(section.parts, 1) if not isinstance(part, str)",
        "([p for p in section.parts if not isinstance(p, str)], 1)",
        f"{PAGES} 'valid and benched'",
    ),
    Fault(
        "a page's first column of numbers is text",
        "vllm_kvq/cli/page/tree.py::_cell",
        ">=",
        ">",
        f"{PAGES} aligned",
    ),
    Fault(
        "a page shows its first plots twice",
        "vllm_kvq/cli/eval/page.py::page",
        "others = [picture for picture in drawn or () if picture not in first]",
        "others = [*(drawn or ())]",
        f"{PAGES} 'every_table and evaluated'",
    ),
)

FAULTS: tuple[Fault, ...] = (*FIGURES, *READ, *CONFORM, *SHOWN)
