"""Faults in what plants faults."""

from __future__ import annotations

from proof.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    # mutants
    Fault(
        "a run that is stopped leaves its tests running",
        "proof/mutants/main.py::plant",
        "stop()",
        "",
        "tests/instruments/mutants/test_mutants_pytests.py -k 'stopped and 15'",
    ),
    Fault(
        "a run that is stopped leaves the servers of its tests",
        "proof/mutants/pytests.py::end",
        "(recursive=True)",
        "()[1:]",
        "tests/instruments/mutants/test_mutants_pytests.py -k 'stopped and 15'",
    ),
    Fault(
        "a fault's tests run with the code that was imported before it was planted",
        "proof/mutants/warm.py",
        '", "vllm_kvq", "',
        '", "',
        "tests/instruments/mutants/test_mutants_pytests.py -k others_have_made",
    ),
    Fault(
        "a compiler's kept objects forget its flags",
        "proof/mutants/objects.py::main",
        "repr(flags).encode() +",
        "",
        "tests/instruments/mutants/test_mutants_pytests.py -k objects_are_kept",
    ),
    Fault(
        "a copy's compiled modules are judged by their time",
        "proof/mutants/main.py::compile_modules",
        "CHECKED_HASH",
        "TIMESTAMP",
        "tests/instruments/mutants/test_mutants.py -k valid_by_its_contents",
    ),
    Fault(
        "a fault is planted wherever its text is",
        "proof/mutants/fault.py::Fault._extent",
        "return places[0]",
        "return 0, len(text)",
        "tests/instruments/mutants/test_mutants_faults.py -k named_function",
    ),
    Fault(
        "a fault that is no Python is caught by every test",
        "proof/mutants/fault.py::_differ",
        "return False",
        "return True",
        "tests/instruments/mutants/test_mutants_faults.py -k no_longer_applies",
    ),
    Fault(
        "what was caught counts for a file that has changed",
        "proof/mutants/kept.py::Kept._mark",
        "fault.function(self.root)",
        "fault.before",
        "tests/instruments/mutants/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "a fault counts as caught in what the checkout has become",
        "proof/mutants/kept.py::Kept.keep",
        "self._now.get(fault.name) or",
        "",
        "tests/instruments/mutants/test_mutants.py -k what_was_tested",
    ),
    Fault(
        "a comment makes a fault be planted again",
        "proof/mutants/kept.py::what_runs",
        "return ast.dump(tree)",
        "return text",
        "tests/instruments/mutants/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "a fault that is no longer in the list stays recorded",
        "proof/mutants/kept.py::Kept.__init__",
        " if name in known",
        "",
        "tests/instruments/mutants/test_mutants.py -k where_it_was_stopped",
    ),
    Fault(
        "--afresh plants nothing again",
        "proof/mutants/main.py::main",
        "kept.forget(chosen)",
        "kept.forget(())",
        "tests/instruments/mutants/test_mutants.py::test_the_command",
    ),
)
