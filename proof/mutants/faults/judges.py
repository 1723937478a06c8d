"""Faults in what runs programs that models wrote, and in proofs: the sweep of lengths, options, the machine for PTX."""

from __future__ import annotations

from proof.mutants.fault import Fault

HUMAN_EVAL = "vllm_kvq/eval/humaneval"
PROCESS, WALLS = f"{HUMAN_EVAL}/sandbox_process.py", f"{HUMAN_EVAL}/sandbox_walls.py"
SANDBOX = "tests/eval/test_sandbox.py -k"
SHUT_IN = "tests/eval/test_sandbox_walls.py -k"
ANSWERS = "tests/eval/test_human_eval.py -k"
RESIDUES = "tests/engine/test_residues.py -k"
MACHINE = "tests/ptx/test_machine.py -k"

PROGRAMS = (
    Fault(
        "a program's orphans are somebody else's",
        PROCESS,
        "    libc.prctl(SUBREAPER, 1, 0, 0, 0)\n",
        "",
        f"{SANDBOX} hides",
    ),
    Fault(
        "a forked copy says that the program has passed",
        PROCESS,
        "if os.getpid() == me:",
        "if me:",
        f"{SANDBOX} forked_copy",
    ),
    Fault(
        "a program fills the disk in folders below its own",
        PROCESS,
        "                        folders.append(entry.path)\n",
        "                        continue\n",
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
        '    "semget": (64, 190),\n',
        "",
        f"{SHUT_IN} 'are_refused and semget'",
    ),
    Fault(
        "a program's sets have another order each time",
        f"{HUMAN_EVAL}/sandbox.py",
        '"PYTHONHASHSEED": "0", ',
        "",
        f"{SANDBOX} same_order",
    ),
    Fault(
        "some of the problems are taken for all",
        f"{HUMAN_EVAL}/problems.py",
        "    if len(every) != COUNT:\n",
        "    if not every:\n",
        f"{ANSWERS} other_contents",
    ),
    Fault(
        "a function loses its decorators",
        f"{HUMAN_EVAL}/problems.py",
        "lines[_first_line(node) - 1 : node.end_lineno]",
        "lines[node.lineno - 1 : node.end_lineno]",
        f"{ANSWERS} no_definition",
    ),
    Fault(
        "answers with other constants are taken for the same",
        "vllm_kvq/eval/run/comparison.py",
        "            **named(choice, self.servers),\n",
        "",
        f"{ANSWERS} servers_constants",
    ),
    Fault(
        "a problem is solved in its own context",
        f"{HUMAN_EVAL}/run.py",
        "others = [problem for problem in self.every if problem not in batch]",
        "others = [*self.every]",
        f"{ANSWERS} before_a_question",
    ),
    Fault(
        "every seed draws the same context",
        f"{HUMAN_EVAL}/chat.py",
        "random.Random(seed)",
        "random.Random(0)",
        f"{ANSWERS} seed_draws",
    ),
    Fault(
        "problems that a format loses are those that it wins",
        "vllm_kvq/cli/eval/humaneval.py",
        "((True, True), (True, False), (False, True), (False, False))",
        "((True, True), (False, True), (True, False), (False, False))",
        f"{ANSWERS} counts_are_paired",
    ),
)
PROOFS = (
    Fault(
        "the sweep does not go beyond the window",
        "proof/residues/sweep.py",
        "2 * setup.block_size + window + MORE + 1",
        "2 * setup.block_size + MORE + 1",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "answers of the sweep stop at the page's border",
        "proof/residues/sweep.py",
        "page - length % page + 2",
        "page - length % page",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "nothing hits the sweep's last page",
        "proof/residues/sweep.py",
        "range(1, length // page + 1)",
        "range(1, length // page)",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "a sweep of nothing finds nothing",
        "proof/residues/main.py",
        "options.jobs < 1 or options.stride < 1",
        "options.jobs < 1 or options.stride == 0",
        f"{RESIDUES} of_nothing",
    ),
    Fault(
        "a page of the sweep has another command than was run",
        "proof/residues/main.py",
        '("stride", 1), ("runner", "V1"))',
        '("stride", 1))',
        f"{RESIDUES} has_the_command",
    ),
    Fault(
        "a sweep that finds a mismatch is no failure",
        "proof/fuzz/listed.py",
        "return int(bool(self.findings))",
        "return int(not self.rows)",
        f"{RESIDUES} replayed",
    ),
    Fault(
        "bits that buy nothing are no finding",
        "proof/options/judge.py",
        "if not errors[1] < errors[0]:",
        "if errors[1] > errors[0]:",
        "tests/test_option_properties.py -k buy_nothing",
    ),
    Fault(
        "a warp's barrier orders other warps",
        "proof/ptx/memory.py",
        "~((self.warp[kind][places] == warp) & ordered_in_warp)",
        "~ordered_in_warp",
        f"{MACHINE} missing_barrier",
    ),
    Fault(
        "an access may end behind its tensor",
        "proof/ptx/memory.py",
        "bad |= address + np.uint64(nbytes) > self.ends[part]",
        "bad |= address >= self.ends[part]",
        f"{MACHINE} outside",
    ),
    Fault(
        "narrow tiles are shuffled as wide ones",
        "proof/ptx/wgmma.py",
        "(at >> 7 & (width // 16 - 1)) << 4",
        "(at >> 7 & 7) << 4",
        f"{MACHINE} swizzled",
    ),
)

FAULTS: tuple[Fault, ...] = (*PROGRAMS, *PROOFS)
