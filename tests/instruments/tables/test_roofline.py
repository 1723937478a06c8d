"""The computed roofline: instructions find their units, bounds are arithmetic, and docs/gpu.md has what is printed."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from proof.tables import attended
from proof.tables.gpu import pipes, roofline
from proof.tables.gpu.roofline import CHIPS, Chip, Count
from vllm_kvq.formats.table import public_formats

ROOT = Path(__file__).resolve().parents[3]
LOOP = {
    "HMMA.16816.F32 R4, R8, R12, R4": "tensor",
    "@!P0 MUFU.EX2 R3, R3": "sfu",
    "I2F.U8 R3, R4": "sfu",
    "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]": "lsu",
    "@P1 STG.E desc[UR4][R2.64], R5": "lsu",
    "SHFL.IDX PT, R3, R4, R5, 0x1f": "lsu",
    "HFMA2.MMA R3, R4, R5, R6": "fma",
    "IMAD.MOV.U32 R3, RZ, RZ, R4": "fma",
    "LOP3.LUT R3, R4, 0xf, RZ, 0xc0, !PT": "alu",
    "HSETP2.BF16_V2.GEU.AND P0, PT, R3, RZ, PT": "alu",
    "UIADD3 UR4, UR4, 0x1, URZ": "other",
    "@!UP0 BRA `(.L_x_1)": "other",
}


@pytest.mark.parametrize("instruction", LOOP)
def test_every_instruction_has_its_unit(instruction: str) -> None:
    assert pipes.pipe(instruction) == LOOP[instruction]


def test_counts_are_all_of_a_loop() -> None:
    counts = pipes.count(LOOP)
    assert counts == {"tensor": 1, "sfu": 2, "lsu": 3, "fma": 2, "alu": 2, "other": 2}
    # a warp's two instructions, 16 lanes at a time, take 4 clocks; four schedulers issue 12 instructions in 3
    taken = pipes.cycles(counts, 512)
    assert taken == {"sfu": 4, "lsu": 3, "fma": 0.5, "alu": 1, "tensor": 4, "issue": 3}


def test_the_slowest_bounds() -> None:
    chip = Chip("a chip", 90, 1e12, 10, 1e9, 1024, "")
    counts = dict.fromkeys(pipes.PIPES, 0.0)
    assert chip.seconds(500) == {"bytes": 5e-10}
    taken = chip.seconds(500, counts | {"alu": 20})
    assert taken["alu"] == pytest.approx(10 / 1e10)
    assert max(taken, key=taken.__getitem__) == "alu"
    assert max(chip.seconds(2000, counts | {"alu": 20}).items(), key=lambda item: item[1]) == ("bytes", 2e-9)


def test_no_loop_is_refused() -> None:
    whole = Count("squat2", 90, 64, 1, 1, 1, 1, 1, 1)
    for field, value in (("tokens", 0), ("alu", -1)):
        with pytest.raises(ValueError, match="has no loop"):
            dataclasses.replace(whole, **{field: value})


def test_every_format_and_chip_has_a_row() -> None:
    rows = roofline.read(roofline.COUNTS)
    assert {(r.format, r.target) for r in rows} == {(f, c.target) for f in attended.shared() for c in CHIPS}
    names = [*itertools.chain(*attended.shared().values()), *attended.by_pytorch()]
    assert sorted(names) == sorted(fmt.name for fmt in public_formats())


def test_the_document_has_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main([]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "gpu.md").read_text()
