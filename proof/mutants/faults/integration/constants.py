"""Faults in constants: what they are fitted to, whose they are, and how kernels read them."""

from __future__ import annotations

from proof.mutants.fault import Fault

CALIBRATION = "tests/engine/worker/test_calibration.py"
KLT = "tests/formats/methods/test_klt.py"
ATTENDING = "vllm_kvq/integration/worker/calibration/attending.py"
FITTING = "vllm_kvq/integration/worker/calibration/fitting.py"
BUDGETS = "vllm_kvq/integration/plan/budgets.py"
OF_BUDGETS = "tests/planning/plan/test_budgets.py -k 'not an_engine'"
FILE = "vllm_kvq/integration/plan/calibration.py"
OWN_TEXT, SERVED = "tests/commands/test_own_text.py", "tests/eval/test_served_constants.py"
TEXT = "vllm_kvq/integration/worker/calibration/text.py"
COMMAND = "vllm_kvq/cli/constants.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "sinks count among the keys that constants are fitted to",
        f"{ATTENDING}::Attending.forward",
        "k[:, self.skipped :]",
        "k",
        f"{CALIBRATION} -k tokens[Llama]",
    ),
    Fault(
        "constants are fitted without windows",
        f"{ATTENDING}::Attending.forward",
        "seen = seen.triu(1 - self.window)",
        "pass",
        f"{CALIBRATION} -k tokens[Gemma-3]",
    ),
    Fault(
        "a window has one token more while constants are fitted",
        f"{ATTENDING}::Attending.forward",
        "1 - self",
        "-self",
        f"{CALIBRATION} -k tokens[Gemma-3]",
    ),
    Fault(
        "constants are fitted without soft caps",
        f"{ATTENDING}::Attending.forward",
        "float(cap)",
        "0.0",
        f"{CALIBRATION} -k tokens[Gemma-2]",
    ),
    Fault(
        "constants are fitted without learned sinks",
        f"{ATTENDING}::Attending.forward",
        ", sinks",
        ", None",
        f"{CALIBRATION} -k tokens[gpt-oss]",
    ),
    Fault(
        "constants are fitted with whatever adapter vLLM's memory names",
        f"{FITTING}::_run",
        "if config.lora_config is not None:",
        "if False:",
        f"{CALIBRATION} -k adapters",
    ),
    Fault(
        "constants are fitted at every start",
        f"{FITTING}::_agreed",
        "told = [None if source.found is None or source.path is None else read(source.path)]",
        "told = [None]",
        f"{CALIBRATION} -k later_start",
    ),
    Fault(
        "layers that share a cache read it without constants",
        "vllm_kvq/integration/worker/layer.py::PackedLayer.calibrate",
        "in self.readers",
        "in ()",
        "tests/models/kinds/test_traffic.py -k 'random_traffic and Gemma-3n and klt3'",
        slow=True,
    ),
    Fault(
        "ranks with copies of a head are not summed up",
        f"{FITTING}::_Ranks.joined",
        "sum(of_ranks[i + 1 : i + self.copies], of_ranks[i])",
        "of_ranks[i]",
        f"{CALIBRATION} -k one_process",
    ),
    Fault(
        "a rank with a copy of a head takes another one's constants",
        f"{FITTING}::_Ranks.own",
        "// self.copies",
        "",
        f"{CALIBRATION} -k one_process",
    ),
    Fault(
        "a damaged file of constants is read",
        f"{FILE}::read",
        'if digest_of(constants) != metadata["digest"]:',
        "if False:",
        f"{CALIBRATION} -k damaged",
    ),
    Fault(
        "constants of another model are read",
        f"{FILE}::_checked",
        '"model": "another model",',
        "",
        f"{CALIBRATION} -k its_own_model",
    ),
    Fault(
        "pipeline stages fit constants",
        f"{FILE}::fitting_problem",
        "(parallel.pipeline_parallel_size > 1,",
        "(False,",
        f"{CALIBRATION} -k refused",
    ),
    Fault(
        "the fingerprint does not cover constants",
        "vllm_kvq/integration/plan/plan.py::_fingerprint",
        "if calibration is None else calibration.meaning",
        "",
        "tests/planning/plan/test_fingerprint.py -k constants",
    ),
    Fault(
        "a format that can be served is fitted to an evaluation's own texts",
        "vllm_kvq/eval/heads/capture.py::Captured.calibrated",
        "if not (page.keys.reference_only or page.values.reference_only):",
        "if False:",
        "tests/eval/heads/test_heads.py -k servers_constants",
    ),
    Fault(
        "an evaluation asks for the constants of one layer's options",
        "vllm_kvq/eval/heads/heads.py::bound",
        ", everywhere",
        ", options",
        "tests/eval/heads/test_heads.py -k servers_constants",
    ),
    Fault(
        "measurements with other constants are taken for the same",
        "vllm_kvq/eval/constants.py::named",
        "servers.digest(choice.format, choice.options)",
        '"none"',
        f"{SERVED} -k file_is_read",
    ),
    Fault(
        "an evaluation fits constants though a server has left some",
        "vllm_kvq/integration/preview/constants.py::Known._found",
        "if path is not None and source.found is not None:",
        "if False:",
        f"{SERVED} -k file_is_read",
    ),
    Fault(
        "the user's text is not what constants are fitted to",
        f"{FITTING}::_text",
        "own is None",
        "True",
        f"{SERVED} -k users_text",
    ),
    Fault(
        "the start that fits constants to the user's text keeps them where servers look",
        f"{FITTING}::_keep",
        "if _own.get() is not None:\n        return\n    if source.path",
        "if source.path",
        f"{SERVED} -k users_text",
    ),
    Fault(
        "constants that are there are taken for those of the user's text",
        f"{FITTING}::calibrate",
        "or _own.get() is not None",
        "",
        f"{SERVED} -k users_text",
    ),
    Fault(
        "only the beginning of the user's text is read",
        f"{TEXT}::pieces",
        "i * (len(ids) - own) // max(1, count - 1)",
        "i * own",
        f"{OWN_TEXT} -k all_the_text",
    ),
    Fault(
        "the user's pieces all stand at the first position",
        f"{TEXT}::pieces",
        "* 0.618033988749895 % 1 * room",
        "* 0",
        f"{OWN_TEXT} -k all_the_text",
    ),
    Fault(
        "constants are fitted to a few words",
        f"{TEXT}::too_short",
        "= LEAST",
        "= 1",
        f"{OWN_TEXT} -k 'one_sentence or counted'",
    ),
    Fault(
        "a hybrid is found out when vLLM has loaded",
        f"{COMMAND}::_hybrid",
        "any(name.startswith(STATES) for name in text)",
        "False",
        f"{OWN_TEXT} -k by_its_configuration",
    ),
    Fault(
        "flags that change nothing are taken next to --text",
        f"{COMMAND}::wrong_usage",
        "next((flag for flag in OTHERS if flag in flags), None)",
        "None",
        f"{OWN_TEXT} -k one_sentence",
    ),
    Fault(
        "heads take turns the other way round",
        "vllm_kvq/formats/constants.py::by_head",
        "(0, (-1, heads))",
        "(0, (heads, -1)).transpose(0, 1)",
        f"{KLT} -k all_heads",
    ),
    Fault(
        "all heads have the first one's allocation",
        "vllm_kvq/formats/methods/klt.py::Transform.of",
        "[:, 0].cpu()",
        "[:1, 0].cpu().expand(len(s), -1)",
        f"{KLT} -k all_heads",
    ),
    Fault(
        "constants of heads of another size are bound",
        "vllm_kvq/formats/methods/klt.py::TransformedKeys.__init__",
        "constants.shape[1:] != (4 + 2 * self.d, self.d)",
        "False",
        f"{KLT} -k other_heads",
    ),
    Fault(
        "the first rank keeps only what its own heads have seen",
        f"{FITTING}::_fitted",
        "of_rank[name]",
        "gathered[0][name]",
        "tests/processes/test_processes.py -k two_ranks_fit",
        slow=True,
    ),
    Fault(
        "an option of some formats is taken with a budget's name",
        f"{BUDGETS}::_that_read",
        "if own := sorted(given - {option.name for option in COMMON} - {CALIBRATION}):",
        "if own := []:",
        OF_BUDGETS,
    ),
    Fault(
        "a budget takes a format that is slow here",
        f"{BUDGETS}::choose",
        "why or path.",
        "",
        OF_BUDGETS,
    ),
    Fault(
        "a budget is looked for although its first format is refused",
        f"{BUDGETS}::choose",
        "refused[name] = str(error)\n                continue",
        "raise",
        OF_BUDGETS,
    ),
    Fault(
        "what a budget was asked for stays in the configuration",
        "vllm_kvq/integration/platform.py::configure",
        "cache.cache_dtype = chosen.format",
        "pass",
        OF_BUDGETS,
    ),
    Fault(
        "a format that is not fitted to the user's file is served in its place",
        f"{BUDGETS}::_that_read",
        "CALIBRATION not in given",
        "True",
        OF_BUDGETS,
    ),
    Fault(
        "slots come by channels, not by digits",
        "vllm_kvq/formats/methods/klt.py::_placed",
        "order = digit.argsort(dim=-1, descending=True, stable=True)",
        "order = torch.arange(slots).expand_as(digit)",
        f"{KLT} -k formula",
    ),
    Fault(
        "a file of constants is written in its place, so that others read half of it",
        "vllm_kvq/integration/plan/calibration.py::write",
        "temporary.write_bytes(content)\n        os.replace(temporary, path)",
        "path.write_bytes(content)",
        "tests/planning/plan/test_constants_files.py -k 'full_disk_is_an_error or always_one_of_theirs'",
    ),
    Fault(
        "a full disk stops a start that would keep its constants",
        f"{FITTING}::_keep",
        "OSError",
        "PermissionError",
        "tests/planning/plan/test_constants_files.py -k stops_no_start",
    ),
    Fault(
        "a user without a home can't serve calibrated formats",
        "vllm_kvq/integration/plan/calibration.py::Source.of",
        "or folder is None",
        "",
        "tests/planning/plan/test_constants_files.py -k without_a_home",
    ),
)
