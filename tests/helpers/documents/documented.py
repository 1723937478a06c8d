"""The commands of documents that nobody walks through (`walk.py`): which test runs each, or why none does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from walk import ROOT


@dataclass(frozen=True)
class Account:
    """Why the commands of a page that begin alike are not walked through; `times` is how many there are."""

    by: str
    """A test that runs them, or what they do, on a small scale: `tests/....py::test_...`. Or a reason, in words."""
    times: int = 1

    @property
    def test(self) -> tuple[str, str] | None:
        """Its file and name."""
        file, _, name = self.by.partition("::")
        return (file, name) if name else None


HOURS = "hours, on real models; what it gave is recorded in docs/results, and tests compare the page with that"
MAKES = "it makes what .ci/run makes before any test"
SUITE = ".ci/run is this, or a part of it"
FUZZ, FUZZER = (
    "tests/engine/fuzz/test_fuzz.py::test_a_short_run_finds_nothing",
    "tests/instruments/test_fuzzer_verdicts.py",
)
RESIDUES = "tests/engine/fuzz/test_residues.py::test_some_lengths"
SOAK = "tests/instruments/soak/test_soak_command.py::test_the_command_passes"
MUTANTS = "tests/instruments/mutants/test_mutants.py::test_the_command"
LONG = "tests/instruments/test_long.py::test_prompts"
CLIENTS = "tests/instruments/test_clients.py::test_a_right_server_passes_every_case"
PTX = "tests/ptx/test_kernels.py::test_triton_kernels"
ATTENTION = "tests/commands/test_bench.py::test_attention_prints_ratios_and_writes_csv_and_plot"
TEXTS = "tests/eval/test_served_constants.py::test_a_server_serves_what_the_users_text_gave"
EVAL = "tests/eval/run/test_eval_command.py::test_json_and_files"
DOCKER = "it needs Docker; tests/shipping/test_docker.py reads what it would build"
GPU = "it needs a GPU; tests/cuda/test_gpu_scripts.py says what it would do there"
TABLES = "tests/documents/test_documents.py::test_the_tables_of_quality_are_what_was_measured"
UPSTREAM = "it shows a fault of vLLM's own, without the plugin"
ADMIT = "tests/instruments/admit/test_admit.py::test_the_page_holds_the_output"
CONTEXTS = "tests/engine/fuzz/test_contexts.py::test_a_short_one"

ACCOUNTS: Mapping[str, Mapping[str, Account]] = {
    "CONTRIBUTING.md": {
        "make check": Account(SUITE),
        "make test": Account(SUITE, 2),
        "make lint types format": Account(SUITE),
        "make fuzz": Account(FUZZ),
        "make soak": Account(SOAK),
        "make site": Account("tests/documents/site/test_site.py::test_every_document_is_in_the_navigation"),
    },
    "docker/README.md": {
        "MODEL=Qwen/Qwen3-0.6B docker compose": Account(DOCKER, 2),
        "docker build": Account(DOCKER),
        "docker run": Account(DOCKER),
    },
    "docs/architecture.md": {
        "vllm-kvq formats": Account("tests/documents/pages/test_architecture.py::test_commands"),
        "python -m proof --help": Account("tests/documents/pages/test_architecture.py::test_commands"),
        "make lint": Account("tests/documents/pages/test_architecture.py::test_commands"),
    },
    "docs/benchmarks.md": {
        "vllm-kvq bench attention": Account(ATTENTION, 4),
        "vllm-kvq bench slow": Account("tests/commands/test_bench.py::test_the_slow_ones_are_timed"),
        "python -m proof instructions": Account(
            "tests/kernels/cpu/test_cpu_probe.py::test_only_the_library_counts_and_always_alike"
        ),
        "vllm-kvq bench prefill": Account("tests/commands/test_figures.py::test_prefill", 2),
        "vllm-kvq bench capacity": Account("tests/commands/test_bench_capacity.py::test_two_real_servers", 2),
        "vllm-kvq bench serve": Account("tests/commands/test_bench.py::test_serve_compares_two_real_servers"),
        "vllm-kvq bench decode": Account("tests/commands/test_figures.py::test_decode"),
    },
    "docs/choosing.md": {
        "vllm serve MODEL --config configs/presets/": Account(
            "tests/planning/plan/test_presets.py::test_a_preset_serves", 3
        ),
    },
    "docs/formats.md": {"vllm-kvq calibrate MODEL --text": Account(TEXTS)},
    "docs/gpu.md": {
        "bash bench/gpu.sh": Account(GPU, 2),
        "bash bench/gpu_serve.sh": Account(GPU),
        "python bench/gpu_sweep.py": Account(GPU),
        "python -m proof ptx": Account(PTX, 2),
        "python -m proof roofline": Account(
            "tests/instruments/tables/test_roofline.py::test_the_document_has_what_is_printed"
        ),
    },
    "docs/how-it-works.md": {
        "python -m proof spectrum": Account(
            "tests/instruments/tables/test_spectrum.py::test_what_is_written_is_what_is_drawn"
        ),
    },
    "docs/index.md": {
        "make kernels": Account(MAKES),
        "vllm serve MODEL": Account("tests/documents/commands/test_walks.py::test_a_cpu_box"),
    },
    "docs/metrics.md": {"curl": Account("tests/servers/test_metrics.py::test_the_documents_command")},
    "docs/papers.md": {
        "vllm-kvq eval .weights/": Account(HOURS),
        "vllm serve MODEL": Account("tests/engine/oracle/test_by_layer.py::test_what_is_said"),
        "vllm-kvq eval MODEL": Account(EVAL),
    },
    "docs/peers.md": {
        "python -m proof weights": Account(HOURS),
        "vllm-kvq eval .weights/": Account(HOURS, 7),
        "for MODEL in": Account(HOURS),
        "python scripts/quality_tables.py": Account(TABLES),
    },
    "docs/quality.md": {
        "vllm-kvq eval .weights/": Account(HOURS, 5),
        "vllm-kvq eval humaneval .weights/": Account(HOURS, 3),
        "for MODEL in": Account(HOURS, 2),
    },
    "docs/regression.md": {
        "python -m proof biases": Account("tests/instruments/demo/test_biases.py::test_the_command"),
        "for MODEL in": Account(HOURS),
        "vllm-kvq eval $MODEL": Account(HOURS, 2),
        "python scripts/quality_tables.py": Account(TABLES),
    },
    "docs/results/admit-0.31.md": {"python -m proof admit": Account(ADMIT)},
    "docs/results/admit-0.33.md": {"python -m proof admit": Account(ADMIT)},
    "docs/results/contexts.md": {"python -m proof contexts": Account(CONTEXTS)},
    "docs/results/clients.md": {"python -m proof clients": Account(CLIENTS)},
    "docs/results/fuzz-72.md": {"python -m proof fuzz": Account(FUZZ)},
    "docs/results/fuzz-v2.md": {"python -m proof fuzz": Account(FUZZ)},
    "docs/results/fuzz.md": {"python -m proof fuzz": Account(FUZZ)},
    "docs/results/gpu-compile.md": {
        "python -m proof compile": Account("tests/triton/test_compile.py::test_no_spills_and_few_instructions", 2),
    },
    "docs/results/long.md": {"python -m proof long": Account(LONG)},
    "docs/results/mutants.md": {"python -m proof mutants": Account(MUTANTS)},
    "docs/results/residues.md": {"python -m proof residues": Account(RESIDUES)},
    "docs/scaling.md": {
        "python examples/ray_batch.py": Account(
            "tests/processes/test_ray_batch.py::test_parquet_and_chats_on_two_engines", 2
        ),
        "python examples/ray_serve.py": Account("tests/processes/test_ray_serve.py::test_a_question", 2),
    },
    "docs/testing.md": {
        "make check": Account(SUITE),
        "make test": Account(SUITE, 2),
        "KVQ_WEIGHTS=.weights make test": Account("it needs real models, which it downloads"),
        "make fuzz": Account(FUZZ),
        "make soak": Account(SOAK),
        "make mutants": Account(MUTANTS),
        "python -m proof fuzz --requests": Account(f"{FUZZER}::test_a_session_of_so_many_requests"),
        "python -m proof fuzz --seed": Account(FUZZ),
        "KVQ_WEIGHTS=.weights python -m proof fuzz": Account(f"{FUZZ.rpartition('::')[0]}::test_copies_of_real_models"),
        "python -m proof fuzz --replay": Account(f"{FUZZER}::test_replay"),
        "python -m proof residues": Account(RESIDUES, 3),
        "python -m proof contexts": Account(CONTEXTS, 2),
        "python -m proof admit": Account(ADMIT),
        "python -m proof long": Account(LONG),
        "python -m proof options": Account(
            "tests/instruments/test_option_properties.py::test_combinations_of_every_format"
        ),
        "python -m proof sanitize": Account(
            "tests/instruments/test_sanitized_server.py::test_a_server_without_a_report"
        ),
        "python -m proof emulate": Account(
            "tests/kernels/compiled/test_emulated.py::test_every_kernel_is_held_to_the_reference"
        ),
        "python -m proof clients": Account(CLIENTS),
        "python -m proof ptx": Account(PTX),
        "python -m proof  ": Account("tests/instruments/test_proof.py::test_usage"),
    },
    "docs/troubleshooting.md": {
        "vllm-kvq doctor": Account("tests/planning/preview/test_doctor.py::test_all_is_well"),
        "vllm-kvq check MODEL": Account("tests/planning/preview/test_check.py::test_yes"),
    },
    "docs/upstream.md": {
        "vllm serve MODEL": Account(UPSTREAM, 2),
        "sleep": Account(UPSTREAM, 5),
        "ps": Account(UPSTREAM, 2),
        "curl": Account(UPSTREAM),
        "VLLM_CPU_OMP_THREADS_BIND=": Account(UPSTREAM),
    },
    "examples/kubernetes/README.md": {"docker build": Account(DOCKER, 3)},
    "models/demo/README.md": {
        "python -m proof train": Account(
            "tests/instruments/demo/test_demo_model.py::test_training_resumes_where_it_was"
        ),
    },
}
"""Page -> how commands begin -> their account. The longest beginning counts."""

PROSE: Mapping[str, tuple[str, ...]] = {
    "README.md": ("from vllm_kvq import",),
    "docs/architecture.md": (
        "vllm_kvq/cli/", "plugin.py ", "calibrate.py ", "humaneval/ ", "roundtrip.py ", "KVQImpl.forward ",
        "--kv-cache-dtype squat2 ",
    ),
    "docs/cpu.md": ("library/ ",),
    "docs/formats.md": ("--additional-config ",),
    "docs/gpu.md": ("begin -> ",),
    "docs/how-it-works.md": ("M = d C_Q ", "mu(n) = R("),
    "docs/models.md": ("vllm-kvq: --kv-cache-dtype ",),
    "docs/testing.md": ("requests: ",),
    "docs/upstream.md": (
        "the manager of ", "wrapped: ", "layers: ", "wrapped, started: ", "triton_kernels: ", "temperatures are ",
        "RuntimeError: ", "IndexError: ", "the first adapter, ", "rows of tokens: ",
    ),
    "models/demo/README.md": ("651bb9c5",),
}  # fmt: skip
"""Page -> how a block begins that is not for a shell."""


def account(page: str, text: str) -> str | None:
    """The beginning under which this command is accounted for."""
    return max((start for start in ACCOUNTS[page] if text.startswith(start)), key=len, default=None)


def every_page() -> list[str]:
    """All documents of this project."""
    patterns = ("*.md", "docs/**/*.md", "docker/*.md", "examples/**/*.md", "models/**/*.md", "packaging/**/*.md")
    return sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})
