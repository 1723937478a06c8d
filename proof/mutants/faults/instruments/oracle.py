"""Faults in the fuzzer and the oracle."""

from __future__ import annotations

from proof.mutants.fault import Fault

FUZZER = "tests/instruments/test_fuzzer_verdicts.py"
KINDS = "tests/instruments/test_fuzzer_kinds.py"
ADAPTERS = "tests/models/test_adapters.py"
STRUCTURED = "tests/engine/oracle/test_structured.py"
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
    Fault(
        "models that see images are drawn as seldom as the others",
        "proof/fuzz/kinds.py::_group",
        "arch.adapter or arch.vision",
        "arch.adapter",
        f"{KINDS} -k as_often",
    ),
    Fault(
        "two pictures of a prompt have no words between them",
        "proof/fuzz/draw.py::Drawer._shown",
        "{min(len(prompt), rng.choice((0, 3, 40, self.page, 150))) for _ in range(count)}",
        "[min(len(prompt), rng.choice((0, 3, 40, self.page, 150))) for _ in range(count)]",
        f"{KINDS} -k pictures_are_drawn",
    ),
    Fault(
        "copies of real models are asked with the Llama's words",
        "proof/fuzz/draw.py::Drawer.__init__",
        "WORDS_OF_COPIES if setup.model in COPIES else WORDS",
        "WORDS",
        f"{KINDS} -k 'copy or copies'",
    ),
    Fault(
        "copies of real models have the Llama's tokenizer",
        "proof/fuzz/attempt.py::checkpoint_of",
        "tokenizer_of(name) if name in COPIES else llama",
        "llama",
        f"{KINDS} -k 'copy or copies'",
    ),
    Fault(
        "a copy's hidden states are no multiple of its heads",
        "proof/models/copies.py::_small",
        'math.lcm(config["num_attention_heads"], 64)',
        "64",
        f"{KINDS} -k 'copy or copies'",
    ),
    Fault(
        "a copy of a model without windows has one layer",
        "proof/models/copies.py::_small",
        'max(2, 1 + kinds.index("full_attention"))',
        '1 + kinds.index("full_attention")',
        f"{KINDS} -k 'copy or copies'",
    ),
    Fault(
        "a case may have no words but the Llama's",
        "proof/fuzz/case.py::Case.__post_init__",
        "self.setup.arch.text().vocab_size",
        'MODEL["vocab"]',
        f"{KINDS} -k 'copy or copies'",
    ),
    Fault(
        "plain vLLM gives requests without an adapter the last one",
        "proof/fuzz/case.py::Setup.arguments",
        "or self.arch.adapter",
        "",
        f"{KINDS} -k plain",
    ),
    Fault(
        "a failing case keeps an adapter that it does not need",
        "proof/fuzz/shrink.py",
        '{"adapter": 0},',
        "",
        f"{KINDS} -k failure_needs",
    ),
    # oracle
    Fault(
        "the oracle's pages are those of any adapter",
        "proof/oracle/reference/lives.py::_Sample.keys",
        "self.request.adapter",
        "0",
        f"{ADAPTERS} -k not_in_keys",
    ),
    Fault(
        "the reference adds the first adapter to all requests that have one",
        "proof/oracle/adapters.py::Adapters._add",
        "self._pairs(number)",
        "self._pairs(1)",
        f"{ADAPTERS} -k every_token",
    ),
    Fault(
        "vLLM is told one name for all adapters",
        "proof/oracle/adapters.py::asked_for",
        'f"adapter {number}"',
        '"adapter"',
        f"{ADAPTERS} -k every_token",
    ),
    Fault(
        "tokens with other letters, too, pass the reference's mask",
        "proof/oracle/structured.py::Vocabulary.made_of",
        "set(text) <= mine",
        "set(text) & mine",
        f"{STRUCTURED} -k tokens_of_some_letters",
    ),
    Fault(
        "tokens of single bytes never pass the reference's mask",
        "proof/oracle/structured.py::Vocabulary.made_of",
        "or text in single",
        "",
        f"{STRUCTURED} -k bytes_that_are_letters",
    ),
    Fault(
        "one request's stop tokens are ruled out for all of its letters",
        "proof/oracle/structured.py::Vocabulary.allowed",
        ".clone()",
        "",
        f"{STRUCTURED} -k stop_tokens",
    ),
    Fault(
        "a token that a grammar rules out is infinitely far from the reference's",
        "proof/oracle/judge.py::_behind",
        "FORBIDDEN",
        "-math.inf",
        f"{STRUCTURED} -k every_token",
    ),
    Fault(
        "one request's grammar holds all of its engine",
        "proof/oracle/judge.py::_behind",
        "row[~model",
        "logits[:, ~model",
        f"{STRUCTURED} -k every_token",
    ),
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
