"""Faults in proofs: the sweep of lengths, options, the machine for PTX."""

from __future__ import annotations

from proof.mutants.fault import Fault

RESIDUES = "tests/engine/fuzz/test_residues.py -k"
MACHINE = "tests/ptx/test_machine.py -k"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "the sweep does not go beyond the window",
        "proof/residues/sweep.py::lengths",
        "window +",
        "",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "answers of the sweep stop at the page's border",
        "proof/residues/sweep.py::cold",
        "+ 2",
        "",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "nothing hits the sweep's last page",
        "proof/residues/sweep.py::hits",
        "+ 1",
        "",
        f"{RESIDUES} is_asked",
    ),
    Fault(
        "a sweep of nothing finds nothing",
        "proof/residues/main.py::main",
        "stride < 1",
        "stride == 0",
        f"{RESIDUES} of_nothing",
    ),
    Fault(
        "a page of the sweep has another command than was run",
        "proof/residues/main.py::page",
        ', ("runner", "V1")',
        "",
        f"{RESIDUES} has_the_command",
    ),
    Fault(
        "a sweep that finds a mismatch is no failure",
        "proof/fuzz/listed.py::Judged.say",
        "bool(self.findings)",
        "not self.rows",
        f"{RESIDUES} replayed",
    ),
    Fault(
        "bits that buy nothing are no finding",
        "proof/options/judge.py::_errors_that_do_not_fall",
        "not errors[1] <",
        "errors[1] >",
        "tests/instruments/test_option_properties.py -k buy_nothing",
    ),
    Fault(
        "a warp's barrier orders other warps",
        "proof/ptx/memory.py::Shared._others",
        "~((self.warp[kind][places] == warp) & ordered_in_warp)",
        "~ordered_in_warp",
        f"{MACHINE} missing_barrier",
    ),
    Fault(
        "an access may end behind its tensor",
        "proof/ptx/memory.py::Tensors._places",
        "+ np.uint64(nbytes) >",
        ">=",
        f"{MACHINE} outside",
    ),
    Fault(
        "narrow tiles are shuffled as wide ones",
        "proof/ptx/instructions/wgmma.py::places",
        "(width // 16 - 1)",
        "7",
        f"{MACHINE} swizzled",
    ),
)
