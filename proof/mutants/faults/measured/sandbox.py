"""Faults in what runs programs that models wrote, and in what counts their answers."""

from __future__ import annotations

from proof.mutants.fault import Fault

HUMAN_EVAL = "vllm_kvq/eval/humaneval"
PROCESS, WALLS = f"{HUMAN_EVAL}/sandbox_process.py", f"{HUMAN_EVAL}/sandbox_walls.py"
SANDBOX = "tests/eval/humaneval/test_sandbox.py -k"
SHUT_IN = "tests/eval/humaneval/test_sandbox_walls.py -k"
ANSWERS = "tests/eval/humaneval/test_human_eval.py -k"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a program's orphans are somebody else's",
        f"{PROCESS}::main",
        "libc.prctl(SUBREAPER, 1, 0, 0, 0)",
        "",
        f"{SANDBOX} hides",
    ),
    Fault(
        "a forked copy says that the program has passed",
        f"{PROCESS}::_run",
        "os.getpid() ==",
        "",
        f"{SANDBOX} forked_copy",
    ),
    Fault(
        "a program fills the disk in folders below its own",
        f"{PROCESS}::_is_filled",
        "folders.append(entry.path)",
        "continue",
        f"{SHUT_IN} so_much",
    ),
    Fault(
        "a program may read all of /etc",
        WALLS,
        '"/etc/ld.so.cache", "/etc/localtime",',
        '"/etc",',
        f"{SHUT_IN} secrets",
    ),
    Fault(
        "a program may leave semaphores behind",
        WALLS,
        '"semget": (64, 190),',
        "",
        f"{SHUT_IN} 'are_refused and semget'",
    ),
    Fault(
        "a program's sets have another order each time",
        f"{HUMAN_EVAL}/sandbox.py",
        '"PYTHONHASHSEED": "0",',
        "",
        f"{SANDBOX} same_order",
    ),
    Fault(
        "some of the problems are taken for all",
        f"{HUMAN_EVAL}/problems.py::problems",
        "len(every) != COUNT",
        "not every",
        f"{ANSWERS} other_contents",
    ),
    Fault(
        "a function loses its decorators",
        f"{HUMAN_EVAL}/problems.py::definitions",
        "_first_line(node)",
        "node.lineno",
        f"{ANSWERS} no_definition",
    ),
    Fault(
        "answers with other constants are taken for the same",
        "vllm_kvq/eval/run/comparison.py::Comparison.what",
        "**named(choice, self.servers),",
        "",
        f"{ANSWERS} servers_constants",
    ),
    Fault(
        "a problem is solved in its own context",
        f"{HUMAN_EVAL}/run.py::Benchmark.prompts",
        "others = [problem for problem in self.every if problem not in batch]",
        "others = [*self.every]",
        f"{ANSWERS} before_a_question",
    ),
    Fault(
        "batches with contexts of their own are asked together",
        f"{HUMAN_EVAL}/run.py::Benchmark.rounds",
        "len(numbers) if self.behind else",
        "",
        f"{ANSWERS} one_by_one",
    ),
    Fault(
        "answers to batches that are asked together go to other problems",
        f"{HUMAN_EVAL}/run.py::Run._answer",
        "islice(answers, size)",
        "reversed([*islice(answers, size)])",
        f"{ANSWERS} counts_are_paired",
    ),
    Fault(
        "every seed draws the same context",
        f"{HUMAN_EVAL}/chat.py::Chat.context",
        "(seed)",
        "(0)",
        f"{ANSWERS} seed_draws",
    ),
    Fault(
        "problems that a format loses are those that it wins",
        "vllm_kvq/cli/eval/humaneval.py::Paired.of",
        "(True, False), (False, True)",
        "(False, True), (True, False)",
        f"{ANSWERS} counts_are_paired",
    ),
)
