"""Instructions of a program -> what a block runs."""

from __future__ import annotations

from dataclasses import replace

from proof.ptx.instructions.accesses import ACCESSES
from proof.ptx.instructions.arithmetic import ARITHMETIC, plain
from proof.ptx.instructions.collective import COLLECTIVE
from proof.ptx.instructions.operands import Operands, Pure
from proof.ptx.instructions.wgmma import wgmma
from proof.ptx.machine import Step
from proof.ptx.program import Immediate, Instruction, Program, Symbol, Unsupported

KNOWN = ARITHMETIC | ACCESSES | COLLECTIVE | {"wgmma": wgmma}


def translate(program: Program) -> list[Step]:
    """Raises Unsupported, with the instruction's text."""
    operands = Operands(program)
    return [_step(operands, i) for i in program.code]


def _step(o: Operands, i: Instruction) -> Step:
    step = Step(i, guard=i.guard.slot if i.guard else -1, unless=i.unless)
    if i.name == "bra":
        label = i.operands[-1]
        assert isinstance(label, Symbol)
        return replace(step, jump=o.program.labels[label.name], kind="branch")
    if i.name in ("ret", "exit"):
        return replace(step, kind="exit")
    if i.name in ("bar", "barrier"):
        if "sync" not in i.mods or ("warp" not in i.mods and i.operands != (Immediate(0),)):
            raise Unsupported(i.text)
        return replace(step, kind="barrier")
    try:
        work = KNOWN.get(i.name, plain)(o, i)
    except (Unsupported, ValueError) as error:
        raise Unsupported(f"{error} [{i.text}]") from error
    if isinstance(work, Pure):
        return replace(step, targets=work.targets, values=work.values)
    return replace(step, targets=work.targets, act=work.act)
