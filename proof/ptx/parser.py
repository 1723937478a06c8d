"""PTX text -> `Program`. Registers are numbered without regard to scopes; what is not understood is refused."""

from __future__ import annotations

import re
import struct

import numpy as np

from proof.ptx.program import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Unsupported,
    Vector,
)

SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|nwarpid|lanemask_[lg][te]|lanemask_eq)$")
WIDTH = {"pred": 1, "8": 8, "16": 16, "32": 32, "64": 64}


def _type_bytes(name: str) -> int:
    return int(re.sub(r"\D", "", name)) // 8


class _Parser:
    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        text = re.sub(r"//[^\n]*", "", text)
        # what is for debuggers
        self.text = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", text, flags=re.M)
        self.at = 0

    def program(self) -> Program:
        self.module = Program("")
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", self.text)
        if (
            entry is None
            or len(re.findall(r"\.entry\b", self.text)) != 1
            or re.search(r"^\s*\.func\b", self.text, re.M)
        ):
            raise Unsupported("PTX with other than one entry, or with functions")
        program = self.module
        program.name = entry[1]
        for kind, name, size, init in re.findall(
            r"\.(extern\s+\.shared|shared|global|const)\s+(?:\.align\s+\d+\s+)?((?:\.[bsuf]\d+)\s+[\w$]+)"
            r"((?:\[\d*\])?)\s*(?:=\s*\{([^}]*)\})?\s*;",
            self.text,
        ):
            self._variable(kind, name, size, init)
        at = 0
        for param in filter(None, (p.strip() for p in entry[2].split(","))):
            align = re.search(r"\.align\s+(\d+)\s+\.b8", param)
            kind, name, count = re.findall(r"\.([busf]\d+)\b(?:\s+\.ptr[^%]*?)?\s+([\w$]+)(?:\[(\d+)\])?$", param)[0]
            size = _type_bytes(kind) * int(count or 1)
            step = int(align[1]) if align else _type_bytes(kind)
            at = -(-at // step) * step
            program.params[name] = (at, size)
            at += size
        self.at = entry.end()
        self._body(program)
        return program

    def _variable(self, kind: str, declared: str, size: str, init: str) -> None:
        type_, name = declared.split()
        nbytes = _type_bytes(type_) * int(size.strip("[]") or 1)
        if "shared" in kind:
            at = -(-self.module.static_shared // 128) * 128
            self.module.shared[name] = at
            self.module.static_shared = at if kind.startswith("extern") else at + nbytes
        else:
            values = [int(x, 0) & 0xFFFFFFFFFFFFFFFF for x in init.split(",")] if init else [0] * nbytes
            raw = b"".join(v.to_bytes(8, "little")[: _type_bytes(type_)] for v in values)
            self.module.data[name] = np.frombuffer(raw.ljust(nbytes, b"\0"), np.uint8).copy()

    def _body(self, program: Program) -> None:
        scopes: list[dict[str, Register]] = [{}]
        while True:
            found = re.compile(r"\s*").match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            first = self.text[self.at]
            if first == "{":
                scopes.append({})
                self.at += 1
            elif first == "}":
                scopes.pop()
                self.at += 1
                if not scopes:
                    return
            elif label := re.compile(r"([\w$]+)\s*:(?!:)").match(self.text, self.at):
                program.labels[label[1]] = len(program.code)
                self.at = label.end()
            elif first == ";":
                self.at += 1
            else:
                end = self.text.index(";", self.at)
                self._statement(program, " ".join(self.text[self.at : end].split()), scopes)
                self.at = end + 1

    def _statement(self, program: Program, text: str, scopes: list[dict[str, Register]]) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for declared in names.split(","):
                name, count = re.findall(r"([%\w$]+)(?:<(\d+)>)?", declared)[0]
                for each in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                    bits = WIDTH[kind[1:] if kind == ".pred" else re.sub(r"\D", "", kind)]
                    scopes[-1][each] = Register(len(program.bits), bits, each)
                    program.bits.append(bits)
        elif text.startswith(".shared"):
            found = re.match(r"\.shared (?:\.align \d+ )?(\.\w+ [\w$]+)(\[\d*\])?$", text)
            if found is None:
                raise Unsupported(text)
            self._variable("shared", found[1], found[2] or "", "")
        elif text.startswith(".pragma"):
            pass  # hints for ptxas
        elif text.startswith("."):
            raise Unsupported(text)
        else:
            program.code.append(self._instruction(text, scopes))

    def _instruction(self, text: str, scopes: list[dict[str, Register]]) -> Instruction:
        guard, unless, rest = None, False, text
        if text.startswith("@"):
            word, rest = text.split(None, 1)
            unless = word[1] == "!"
            found = self._operand(word[2:] if unless else word[1:], scopes)
            assert isinstance(found, Register)
            guard = found
        opcode, _, arguments = rest.partition(" ")
        # a block's own shared memory has two names
        name, *mods = opcode.replace("shared::cta", "shared").split(".")
        operands = [self._operand(a.strip(), scopes) for a in _split(arguments)]
        return Instruction(name, tuple(mods), tuple(operands), guard, unless, text)

    def _operand(self, text: str, scopes: list[dict[str, Register]]) -> Operand:
        if text == "_":
            return Sink()
        if text[0] == "{":
            return Vector(tuple(self._operand(part.strip(), scopes) for part in _split(text[1:-1])))
        if text[0] == "[":
            base, _, offset = text[1:-1].replace("+-", "+ -").partition("+")
            place = self._operand(base.strip(), scopes)
            if not isinstance(place, (Register, Symbol, Immediate)):
                raise Unsupported(f"address {text}")
            return Address(place, int(offset or "0", 0))
        if "|" in text:
            first, second = (self._operand(part.strip(), scopes) for part in text.split("|"))
            return Pair(first, second)
        if text[0] == "!":
            register = self._operand(text[1:], scopes)
            assert isinstance(register, Register)
            return Negated(register)
        for scope in reversed(scopes):
            if text in scope:
                return scope[text]
        if SPECIAL.match(text):
            return Special(text)
        if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text):
            return Immediate(int(found[1], 16), 32)
        if found := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", text):
            return Immediate(int(found[1], 16), 64)
        if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"-?\d+\.\d*", text):
            return Immediate(int.from_bytes(struct.pack("<d", float(text)), "little"), 64)
        if text[0] == "%":
            raise Unsupported(f"register {text}")
        return Symbol(text)


def _split(text: str) -> list[str]:
    """At commas outside braces and brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [*parts, text[last:]] if text.strip() else []


def parse(text: str) -> Program:
    return _Parser(text).program()
