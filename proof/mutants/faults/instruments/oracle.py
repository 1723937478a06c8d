"""Faults in the fuzzer and the oracle."""

from __future__ import annotations

from proof.mutants.fault import Fault

FUZZER = "tests/instruments/test_fuzzer_verdicts.py"
IMAGES = "tests/models/test_images.py"
VERDICTS = "tests/instruments/test_verdicts.py -k 'not by_the_reference'"

FAULTS: tuple[Fault, ...] = (
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
)
