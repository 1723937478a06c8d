"""Faults in what judges: fuzz, soak, clients, oracle, documents, the faults themselves."""

from __future__ import annotations

from proof.mutants.fault import Fault

SOAK = "tests/instruments/test_soak.py tests/instruments/test_soak_command.py -k 'not short'"
CLIENTS = "tests/instruments/test_clients.py"
ADMIT = "tests/instruments/test_admit.py"
FUZZER = "tests/instruments/test_fuzzer_verdicts.py"
IMAGES = "tests/models/test_images.py"
VERDICTS = "tests/instruments/test_verdicts.py -k 'not by_the_reference'"
COMMANDS = "tests/documents/test_commands.py"
KUBERNETES = "tests/shipping/test_kubernetes.py"

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
        "tests/instruments/test_admit_releases.py -k something_else",
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
    Fault(
        "the page of connectors has words of its own",
        "proof/tables/connectors.py::row",
        "REFUSED[name]",
        "trial.found",
        "tests/documents/test_connectors_page.py",
    ),
    # fuzz
    Fault(
        "the fuzzer's exit status is always 0",
        "proof/fuzz/main.py::fuzz",
        "int(session.finding is not None)",
        "0",
        FUZZER,
    ),
    Fault(
        "a replay's exit status is always 0", "proof/fuzz/main.py::replay", "int(bool(verdict.mismatches))", "0", FUZZER
    ),
    Fault(
        "a session goes on after a mismatch",
        "proof/fuzz/session.py::Session._round",
        "return self._found(Case(setup, tuple(new)), Case(setup, tuple(traces)), verdict)\n            if this",
        "pass\n            if this",
        FUZZER,
    ),
    Fault(
        "a lane that breaks is forgotten",
        "proof/fuzz/session.py::Session.run",
        "raise self.error",
        "self.stop.set()",
        FUZZER,
    ),
    Fault(
        "an engine that fails is no mismatch",
        "proof/fuzz/attempt.py::Runner.run",
        'Verdict(mismatches=[f"the engine failed: {error}"])',
        "Verdict()",
        FUZZER,
    ),
    Fault(
        "the fuzzer does not look for leaks",
        "proof/fuzz/attempt.py::Runner.run",
        "[leak for r in results for leak in leaks(r)]",
        "[]",
        FUZZER,
    ),
    Fault("every difference is a tie", "proof/fuzz/attempt.py::Runner.against_plain", "< near", "> -1", FUZZER),
    Fault(
        "a plainer setup is taken back",
        "proof/fuzz/shrink.py::Shrinker.run",
        "case.",
        "path[0].",
        FUZZER,
    ),
    Fault(
        "a run of a number of requests stops with its first engines",
        "proof/fuzz/session.py::Session.over",
        ">= self.requests",
        "> 0",
        FUZZER,
    ),
    Fault(
        "a page of results never tells of a mismatch",
        "proof/fuzz/main.py::write_up",
        '{total["mismatches"]}',
        "0",
        FUZZER,
    ),
    # oracle
    Fault(
        "the oracle's pages are those of any image",
        "proof/oracle/reference/lives.py::_Sample.keys",
        "if p.at < (i + 1) * n)",
        "if False)",
        f"{IMAGES} -k not_in_keys",
    ),
    Fault(
        "the oracle sees images one token further behind",
        "proof/oracle/pictures.py::Shown.inputs",
        ".at",
        ".at - 1",
        f"{IMAGES} -k sees_what",
    ),
    Fault(
        "the oracle's images are shown from their start in every chunk",
        "proof/oracle/pictures.py::Shown.inputs",
        "behind[inside]",
        ": int(inside.sum())",
        f"{IMAGES} -k sees_what",
    ),
    Fault(
        "the oracle turns what follows an image by its position",
        "proof/oracle/pictures.py::Shown._turned",
        "+ behind",
        "",
        f"{IMAGES} -k sees_what",
    ),
    Fault(
        "vLLM is not asked with the second image",
        "proof/oracle/pictures.py::prompt_of",
        "p.seed",
        "request.pictures[0].seed",
        f"{IMAGES} -k 'references and LLaVA and squat2'",
    ),
    Fault(
        "no block leaks",
        "proof/oracle/verdict.py::leaks",
        '[] if before == after else [f"{before - after} blocks were not freed"]',
        "[]",
        VERDICTS,
    ),
    Fault(
        "as many blocks may be gained",
        "proof/oracle/verdict.py::leaks",
        "==",
        "<=",
        VERDICTS,
    ),
    Fault(
        "only the first tokens are compared",
        "proof/oracle/compare.py::differences",
        "if a[:length] != b[:length]:",
        "if a[:2] != b[:2]:",
        VERDICTS,
    ),
    Fault(
        "answers may end early",
        "proof/oracle/compare.py::differences",
        "if r.abort_after is not None else max(len(a), len(b))",
        "",
        VERDICTS,
    ),
    Fault(
        "all mismatches are ties",
        "proof/oracle/judge.py::_unexplained",
        "> statistics.stdev(wrong[c])",
        "> 1e9",
        VERDICTS,
    ),
    Fault(
        "none is a tie by its distance",
        "proof/oracle/judge.py::_unexplained",
        "> statistics.stdev(wrong[c])",
        "> 0",
        VERDICTS,
    ),
    Fault(
        "a broken history is trusted",
        "proof/oracle/judge.py::judge",
        "if history.problems:",
        "if not history.lives:",
        VERDICTS,
    ),
    Fault(
        "the reference likes the least likely token",
        "proof/oracle/judge.py::_behind",
        "amax",
        "amin",
        "tests/instruments/test_verdicts.py -k by_the_reference",
    ),
    # documents and examples
    Fault(
        "a flag has another name than in the documents",
        "proof/residues/main.py::main",
        '"--stride"',
        '"--step"',
        f"{COMMANDS} -k 'read_by and testing'",
    ),
    Fault(
        "a page shows a command that nothing runs",
        "docs/metrics.md",
        "curl -s http://localhost:8000/metrics | grep kvq_",
        "curl -s http://localhost:8000/metrics | grep kvq_\nvllm-kvq doctor",
        f"{COMMANDS} -k 'every_command and metrics'",
    ),
    Fault(
        "KubeRay gets a field that it does not know",
        "examples/kubernetes/rayservice.yaml",
        "minReplicas",
        "minReplica",
        f"{KUBERNETES} -k fields_are_the_charts",
    ),
    Fault(
        "a chart's values are others than Helm was asked about",
        "examples/kubernetes/llm-d.yaml",
        "32768",
        "65536",
        f"{KUBERNETES} -k helm_makes",
    ),
    Fault(
        "a router hears of sinks",
        "vllm_kvq/integration/core/manager.py::SinkManager.cache_blocks",
        "pool.cached_block_hash_to_block.insert(full, block)",
        "pool.cached_block_hash_to_block.insert(full, block)\n            pool._emit_block_removed_events([full])",
        "tests/models/test_kv_events.py -k packed_page_once",
        slow=True,
    ),
    # mutants
    Fault(
        "a run that is stopped leaves its tests running",
        "proof/mutants/main.py::plant",
        "stop()",
        "",
        "tests/instruments/test_mutants_pytests.py -k 'stopped and 15'",
    ),
    Fault(
        "a run that is stopped leaves the servers of its tests",
        "proof/mutants/pytests.py::end",
        "(recursive=True)",
        "()[1:]",
        "tests/instruments/test_mutants_pytests.py -k 'stopped and 15'",
    ),
    Fault(
        "a fault's tests run with the code that was imported before it was planted",
        "proof/mutants/warm.py",
        '", "vllm_kvq", "',
        '", "',
        "tests/instruments/test_mutants_pytests.py -k others_have_made",
    ),
    Fault(
        "a compiler's kept objects forget its flags",
        "proof/mutants/objects.py::main",
        "repr(flags).encode() +",
        "",
        "tests/instruments/test_mutants_pytests.py -k objects_are_kept",
    ),
    Fault(
        "a copy's compiled modules are judged by their time",
        "proof/mutants/main.py::compile_modules",
        "CHECKED_HASH",
        "TIMESTAMP",
        "tests/instruments/test_mutants.py -k valid_by_its_contents",
    ),
    Fault(
        "a fault is planted wherever its text is",
        "proof/mutants/fault.py::Fault._extent",
        "return places[0]",
        "return 0, len(text)",
        "tests/instruments/test_mutants_faults.py -k named_function",
    ),
    Fault(
        "a fault that is no Python is caught by every test",
        "proof/mutants/fault.py::_differ",
        "return False",
        "return True",
        "tests/instruments/test_mutants_faults.py -k no_longer_applies",
    ),
    Fault(
        "what was caught counts for a file that has changed",
        "proof/mutants/kept.py::Kept._mark",
        "fault.function(self.root)",
        "fault.before",
        "tests/instruments/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "a fault counts as caught in what the checkout has become",
        "proof/mutants/kept.py::Kept.keep",
        "self._now.get(fault.name) or",
        "",
        "tests/instruments/test_mutants.py -k what_was_tested",
    ),
    Fault(
        "a comment makes a fault be planted again",
        "proof/mutants/kept.py::what_runs",
        "return ast.dump(tree)",
        "return text",
        "tests/instruments/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "a fault that is no longer in the list stays recorded",
        "proof/mutants/kept.py::Kept.__init__",
        " if name in known",
        "",
        "tests/instruments/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "--afresh plants nothing again",
        "proof/mutants/main.py::main",
        "kept.forget(chosen)",
        "kept.forget(())",
        "tests/instruments/test_mutants.py::test_the_command",
    ),
)
