"""A fixed set of random combinations of options; `python -m proof options` judges any number."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch

from proof.options import judge as judging
from proof.options.case import Case
from proof.options.draw import draw
from proof.options.judge import judge
from proof.options.main import SERVED, main
from vllm_kvq.formats import FORMATS, PageFormat
from vllm_kvq.formats.methods.innerq import HybridKeys, HybridPrefill
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Packed
from vllm_kvq.formats.table import declared_options

PUBLIC = [name for name, fmt in FORMATS.items() if fmt.public]
OTHERS = [name for name in SERVED if name not in PUBLIC]


@pytest.mark.parametrize("name", PUBLIC)
def test_combinations_of_every_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--seed", "1", "--cases", "3", "--formats", name])
    assert status == 0, capsys.readouterr().out


def test_combinations_of_formats_for_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--seed", "1", "--cases", str(len(OTHERS)), "--path", "PyTorch", "--formats", ",".join(OTHERS)])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("case", [
    Case("squat2", 80, 32, "float16", {"W": 32, "S": 5, "r": 7, "lam": 0.03, "floor": 1, "g": 16, "value_bits": 4}),
    Case("innerq2", 64, 32, "float32", {"W": 0, "S": 0, "key_bits": 4, "quant_mode": "asymmetric", "key_norm": "none"}),
])  # fmt: skip
def test_a_gpus_kernels(case: Case) -> None:
    pytest.importorskip("triton")
    verdict = judge(case, ("GPU",))
    assert verdict.paths == ["GPU"]
    assert not verdict.findings


def test_what_a_decode_step_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a codec packs it differently from a prompt, the reference agrees on which is which."""
    monkeypatch.setattr(HybridPrefill, "reference_only", None)
    options = {"W": 0, "S": 0, "quant_mode": "hybrid_prefill"}
    verdict = judge(Case("innerq2", 64, 32, "float32", options), ("PyTorch",))
    assert verdict.paths == ["PyTorch"]
    assert not verdict.findings


def test_every_declared_value_is_drawn() -> None:
    """In many draws each option is left out and set, each choice is drawn, and so are both limits of a range."""
    rng, seen = Random(0), dict[str, set[object]]()
    for i in range(4000):
        case = draw(rng, PUBLIC[i % len(PUBLIC)])
        for name, value in case.options.items():
            seen.setdefault(name, set()).add(value)
    for option, _ in declared_options():
        if option.name in ("N", "recompute", "skip_layers", "W_keys"):
            continue  # options of the cache around a format, and one that is not served
        assert option.name in seen
        if option.choices:
            assert seen[option.name] == {*option.choices}
        elif option.name not in ("W", "S"):
            assert {option.low, option.high} <= seen[option.name]
            for value in seen[option.name]:
                option.check(value)


def test_a_refusal_names_the_option() -> None:
    verdict = judge(Case("squat2", 64, 64, "float32", {"g": 64}))
    assert "option 'g'" in str(verdict.refused)
    assert not verdict.findings
    assert not verdict.paths


def test_what_is_not_served_is_not_judged() -> None:
    verdict = judge(Case("kivi2", 64, 64, "float32", {"token_scale": "balanced"}))
    assert "option 'token_scale' is served only as 'none'" in str(verdict.refused)
    assert not verdict.paths


def test_a_case_is_judged_again_from_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("kivi2", 64, 64, "bfloat16", {"key_bits": 4}, 32, 7)
    (tmp_path / "case").write_text(json.dumps(case.to_json()))
    assert main(["--replay", str(tmp_path / "case"), "--path", "PyTorch"]) == 0
    assert capsys.readouterr().out == "no finding on PyTorch\n"
    (tmp_path / "case").write_text('{"format": "kivi2"}')
    with pytest.raises(SystemExit) as stop:
        main(["--replay", str(tmp_path / "case")])
    assert stop.value.code == 2
    assert "holds no case" in capsys.readouterr().err


# -- the judge itself --------------------------------------------------------------------------------------------------
SOUND = Case("kivi2", 64, 32, "float32", {"W": 0, "S": 0})


def test_it_sees_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the path's answers change: the reference reads the same pages with `unpack`."""
    assert not judge(SOUND, ("PyTorch",)).findings
    features = ChannelKeys.query_features
    monkeypatch.setattr(ChannelKeys, "query_features", lambda self, q: 1.01 * features(self, q))
    assert "answers are off" in judge(SOUND, ("PyTorch",)).findings[0]


def test_it_sees_other_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a path packs changes: values with a larger scale than the reference's."""
    write = PageFormat.write

    def damaged(self: PageFormat, pages: torch.Tensor, page: torch.Tensor, unit: torch.Tensor, fields: Packed) -> None:
        write(self, pages, page, unit, {**fields, "v_scale": 1.1 * fields["v_scale"]})

    monkeypatch.setattr(PageFormat, "write", damaged)
    assert "of the packed elements differ" in judge(SOUND, ("PyTorch",)).findings[0]


def test_it_sees_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = ChannelKeys.unpack

    def infinite(self: ChannelKeys, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        x = unpack(self, fields)
        x[0, 0, 0] = torch.inf
        return x

    monkeypatch.setattr(ChannelKeys, "unpack", infinite)
    assert "finite" in judge(SOUND, ("PyTorch",)).findings[0]


def test_it_sees_bits_that_buy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_error", lambda case, option, fmt: 0.1)
    findings = judge(SOUND, ()).findings
    assert [f.split(":")[0] for f in findings] == ["key_bits", "value_bits"]


def test_it_sees_a_refusal_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HybridKeys, *arguments: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(HybridKeys, "__init__", refuse)
    assert judge(Case("innerq2", 64, 32)).findings == ["refused without naming one of its options, or its heads: no"]


def test_options_it_judges_by_bits_exist() -> None:
    declared: dict[str, Option] = {option.name: option for option, _ in declared_options()}
    for name, values in judging.FEWER_AND_MORE.items():
        for value in values:
            declared[name].check(value)
