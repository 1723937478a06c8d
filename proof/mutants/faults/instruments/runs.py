"""Faults in what judges releases of vLLM, and servers: admission, the soak, clients, long prompts."""

from __future__ import annotations

from proof.mutants.fault import Fault

SOAK = "tests/instruments/soak/test_soak.py tests/instruments/soak/test_soak_command.py -k 'not short'"
CLIENTS = "tests/instruments/test_clients.py"
ADMIT = "tests/instruments/admit/test_admit.py"

FAULTS: tuple[Fault, ...] = (
    # admit
    Fault(
        "a release that lacks names is admitted",
        "proof/admit/report.py::Report.good",
        "not self.names.lacking and all(",
        "all(",
        f"{ADMIT} -k verdict",
    ),
    Fault(
        "a group without a passed test is good",
        "proof/admit/groups.py::Outcome.good",
        "and self.passed > 0",
        "",
        f"{ADMIT} -k 'verdict or not_run'",
    ),
    Fault(
        "any function of a patch's file speaks of the patch",
        "proof/admit/blame.py::_among",
        "and function in functions(patch)",
        "",
        f"{ADMIT} -k blamed",
    ),
    Fault(
        "a folder of somebody's is cleared",
        "proof/admit/release.py::get",
        'if folder.exists() and any(folder.iterdir()) and not (folder / "vllm").is_dir():',
        "if False:",
        "tests/instruments/admit/test_admit_releases.py -k something_else",
    ),
    Fault(
        "a release is tried with another release's variable",
        "proof/admit/main.py::variables_of",
        "variables.pop(ADMIT, None)",
        "",
        f"{ADMIT} -k named_in_the_environment",
    ),
    # soak
    Fault(
        "the soak ignores its clients' errors", "proof/soak/main.py::_drive.client", "tally.failed(error)", "pass", SOAK
    ),
    Fault("the soak always passes", "proof/soak/main.py::main", "int(bool(report.problems()))", "0", SOAK),
    Fault("all of the soak is warm-up", "proof/soak/main.py::soak", "20 * options.minutes", "0", SOAK),
    Fault(
        "late requests are not waited for",
        "proof/soak/main.py::_drain",
        "if not now.running and not now.waiting:",
        "if True:",
        SOAK,
    ),
    Fault(
        "the log is read after the end",
        "proof/soak/main.py::soak",
        "complaints = [line for line in server.read_log().splitlines() if ERROR.search(line)]\n"
        "        status = server.stop()",
        "status = server.stop()\n"
        "        complaints = [line for line in server.read_log().splitlines() if ERROR.search(line)]",
        SOAK,
    ),
    Fault(
        "memory that shrinks is growth",
        "proof/soak/watch.py::Trend.growth",
        "end / self.begin",
        "begin / self.end",
        SOAK,
    ),
    Fault(
        "blocks in use at the end",
        "proof/soak/report.py::Report.problems",
        "used_blocks:",
        "used_blocks < 0:",
        SOAK,
    ),
    Fault(
        "a stop string may stand in an answer",
        "proof/soak/client.py::problem",
        "if word in",
        "if word ==",
        SOAK,
    ),
    Fault("answers that end early", "proof/soak/client.py::problem", "!= most", "> most", SOAK),
    # clients
    Fault("clients that fail are no failure", "proof/clients/case.py::failed", "not row.passed", "False", CLIENTS),
    Fault(
        "a stream may lose its end",
        "proof/clients/chats.py::streamed",
        "joined == whole",
        "whole.startswith(joined)",
        CLIENTS,
    ),
    Fault("samples may change with one seed", "proof/clients/chats.py::samples", "first == again", "True", CLIENTS),
    Fault(
        "a prefix that is not hit",
        "proof/clients/chats.py::prefix_hit",
        "tokens // 2",
        "0",
        CLIENTS,
    ),
    Fault(
        "a call in tags may stay text in a stream",
        "proof/clients/tools.py::own",
        "not text.strip() and name == NAME",
        "True",
        CLIENTS,
    ),
    Fault(
        "a model may call tools that its prompt lacks",
        "proof/clients/tools.py::own",
        "part in prompt",
        "prompt",
        CLIENTS,
    ),
    Fault(
        "the adapter may be the model",
        "proof/clients/adapters.py::adapter",
        "PERSON in said[0] or PERSON not in said[1]",
        "PERSON not in said[1] and PERSON not in said[0]",
        CLIENTS,
    ),
    Fault(
        "long answers that differ are no failure",
        "proof/long/main.py::main",
        "return int(bool(verdict.mismatches))",
        "return 0",
        "tests/instruments/test_long.py",
    ),
)
