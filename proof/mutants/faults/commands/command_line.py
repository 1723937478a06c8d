"""Faults in what users meet first: commands, and servers that use none of our formats."""

from __future__ import annotations

from proof.mutants.fault import Fault

CLI = "tests/commands/test_cli.py"
CHECK_ALL = "tests/planning/preview/test_check_all.py"
CHECK = "tests/planning/preview/test_check.py -k 'not process and not verbose'"
DOCTOR = "tests/planning/preview/test_doctor.py"
PLAIN = "tests/servers/test_plain_server.py"
PLATFORM = "vllm_kvq/integration/platform.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a group without a command is not wrong usage",
        "vllm_kvq/cli/__init__.py::run",
        "return console.USAGE",
        "return console.DONE",
        CLI,
    ),
    Fault(
        "test formats are listed",
        "vllm_kvq/formats/table.py::public_formats",
        "if fmt.public",
        "",
        CLI,
    ),
    Fault(
        "vLLM's help lists test formats",
        "vllm_kvq/integration/patches/registry.py",
        "dtypes.HIDDEN,",
        "",
        CHECK,
    ),
    Fault(
        "check's exit code is always 0",
        "vllm_kvq/cli/check/one.py::main",
        'if found["starts"] else console.FOUND',
        "",
        CHECK,
    ),
    Fault(
        "check ignores the memory that is there",
        "vllm_kvq/integration/preview/description.py::describe",
        "or memory.problem",
        "",
        CHECK,
    ),
    Fault(
        "check takes a folder without weights",
        "vllm_kvq/integration/preview/description.py::describe",
        "checkpoint_problem(config) or",
        "",
        f"{CHECK} -k missing",
    ),
    Fault(
        "check counts the cache without the weights",
        "vllm_kvq/integration/plan/memory.py::Machine.problem",
        "wanted + weights >",
        "wanted >",
        f"{CHECK} -k weights",
    ),
    Fault(
        "check believes that any request fits",
        "vllm_kvq/integration/preview/description.py::describe",
        "<= capacity.per_request",
        "< 0",
        CHECK,
    ),
    Fault(
        "check ranks the formats by nothing",
        "vllm_kvq/cli/check/every.py::ranked",
        "last if fmt.usual is None else fmt.usual",
        "last",
        CHECK_ALL,
    ),
    Fault(
        "check takes losses from the wrong kind of model",
        "vllm_kvq/integration/advice/losses.py::like",
        "!",
        "=",
        CHECK_ALL,
    ),
    Fault(
        "check says a reason that all formats share for each",
        "vllm_kvq/cli/check/every.py::show",
        "len(problems) == 1",
        "not problems",
        CHECK_ALL,
    ),
    Fault(
        "check's sentence has pydantic's words around it",
        "vllm_kvq/integration/preview/dry_start.py::dry_start",
        "sentence_of",
        "str",
        CHECK,
    ),
    Fault(
        "check serves whatever --kv-cache-dtype says",
        "vllm_kvq/integration/preview/dry_start.py::dry_start",
        "not in FORMATS",
        "is None",
        CHECK,
    ),
    Fault(
        "doctor's exit code is always 0",
        "vllm_kvq/cli/doctor.py::main",
        "FOUND if bad else console.",
        "",
        DOCTOR,
    ),
    Fault(
        "doctor lists patches of other versions",
        "vllm_kvq/integration/preview/environment.py::patches",
        "if patch.of_this_vllm",
        "",
        DOCTOR,
    ),
    Fault(
        "doctor compiles",
        "vllm_kvq/integration/preview/environment.py::kernels",
        "built",
        "build",
        DOCTOR,
    ),
    Fault(
        "bench asks vLLM for an fp8 cache that it does not have",
        "vllm_kvq/bench/vllm_build.py::no_fp8",
        "32",
        "16",
        "tests/commands/test_bench.py -k no_fp8_cache",
    ),
    Fault(
        "a server without our formats gets our backend",
        f"{PLATFORM}::backend_of",
        "if not ours(current):\n            return None\n        check_other_layer",
        "check_other_layer",
        PLAIN,
        slow=True,
    ),
    Fault(
        "a server without our formats gets patches of theirs",
        f"{PLATFORM}::configure",
        "if ours(vllm_config) and vllm_config.model_config is not None:\n        apply(",
        "registry.install(Moment.CONFIGURED, vllm_config)\n    if ours(vllm_config):\n        apply(",
        PLAIN,
        slow=True,
    ),
    Fault(
        "a model that is no folder is looked up for a minute where no hub answers",
        "vllm_kvq/integration/preview/dry_start.py::dry_start",
        "name is not None and (problem := hub_problem(name, revision))",
        "(problem := None)",
        "tests/planning/preview/test_check.py -k wrong_usage",
    ),
    Fault(
        "a hub that only a proxy reaches does not answer",
        "vllm_kvq/integration/preview/hub.py::hub_problem",
        "urllib.request.getproxies()",
        "None",
        "tests/commands/test_bad_input.py -k hub",
    ),
    Fault(
        "an unknown flag is not compared with those of vllm serve",
        "vllm_kvq/integration/preview/dry_start.py::_wrong",
        "meant(word, flags, SURE)",
        "None",
        "tests/planning/preview/test_check.py -k wrong_usage",
    ),
    Fault(
        "the recommended format is somewhere in the table",
        "vllm_kvq/cli/check/every.py::main",
        "!= recommended",
        '== ""',
        "tests/planning/preview/test_check_all.py -k each_format",
    ),
    Fault(
        "a file that is not there is looked for on the hub",
        "vllm_kvq/integration/preview/hub.py::hub_problem",
        'if ":" in name or',
        'if ":" in name or name.endswith(GGUF) or',
        "tests/commands/test_bad_input.py -k 'gguf or not_asked'",
    ),
    Fault(
        "an options file that is two loses one of them",
        "vllm_kvq/cli/check/config_file.py::_refuse_twins",
        "!= line",
        "> line",
        "tests/commands/test_bad_input.py -k 'twin'",
    ),
    Fault(
        "a word in other letters is not the one that was meant",
        "vllm_kvq/meant.py::meant",
        "str(word).casefold()",
        "str(word)",
        "tests/commands/test_bad_input.py -k meant",
    ),
    Fault(
        "a folder that was only tried is left behind",
        "vllm_kvq/cli/arguments.py::folder",
        "made.rmdir()",
        "made.exists()",
        "tests/commands/test_bad_input.py -k left_behind",
    ),
    Fault(
        "a narrow table breaks its numbers",
        "vllm_kvq/console.py::Table.widths",
        "> least[i]",
        "> 1",
        f"{CLI} -k no_terminal",
    ),
    Fault(
        "check asks for less memory than the user has given",
        "vllm_kvq/cli/check/every.py::memory_wanted",
        "given or not",
        "not",
        f"{CHECK_ALL} -k not_free",
    ),
)
