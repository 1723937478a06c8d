"""`vllm-kvq conformance`: every format passes, and each mistake is named by the check that is for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_kvq.cli import conformance
from vllm_kvq.eval.conformance.report import conform
from vllm_kvq.eval.conformance.trial import Trial
from vllm_kvq.formats import FORMATS, Geometry, contract
from vllm_kvq.formats.constants import Calibration
from vllm_kvq.formats.contract import broken_promise
from vllm_kvq.formats.methods.lossless import RawKeys
from vllm_kvq.formats.methods.values import RawValues
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.table import Format


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_passes(name: str) -> None:
    for head_size in (64, 80, 128):
        found = conform(FORMATS[name], head_size)
        assert found.refused is not None or found.passed, found.faults
        assert found.refused is None or head_size == 80
    assert 2 < found.bits <= 17


class Missing(RawKeys):
    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {}


class Extra(RawKeys):
    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {**super().pack(x, state), "k_more": x}


class Prefix(RawKeys):
    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return tuple(replace(f, name=f"raw_{f.name}") for f in super().slab_fields)


class Shape(RawKeys):
    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {name: field.flatten(1, 2) for name, field in super().pack(x, state).items()}


class NotFinite(RawKeys):
    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return {name: field / 0 for name, field in super().pack(x, state).items()}


class Range(RawKeys):
    """Codes up to 300 in a byte."""

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (*super().slab_fields, Field("k_code", torch.uint8, (1,)))

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        fields = super().pack(x, state)
        return {**fields, "k_code": torch.full((*next(iter(fields.values())).shape[:2], 1), 300)}


class Divides(RawKeys):
    """Reads groups of zeros back as 0 / 0."""

    def unpack(self, fields: Packed) -> torch.Tensor:
        x = super().unpack(fields)
        return x / x.abs().amax(1, keepdim=True) * x.abs().amax(1, keepdim=True)


class Grows(RawKeys):
    """Finite, but far beyond the largest number that was stored."""

    def unpack(self, fields: Packed) -> torch.Tensor:
        return super().unpack(fields) * 8


class Counts(RawKeys):
    """Bytes that depend on how often it was called."""

    calls = 0

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        Counts.calls += 1
        return super().pack(x + Counts.calls, state)


class Neighbours(RawKeys):
    """All units share the last one's mean."""

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        return super().pack(x - x[-1].mean(), state)


class NotRotated(RawKeys):
    """Reads keys in another order of channels than the queries'."""

    def key_features(self, fields: Packed) -> torch.Tensor:
        return super().key_features(fields).flip(-1)


class States(RawKeys):
    state_rows = 2

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        return keys[:, :1]


class NotANumber(RawKeys):
    def unpack(self, fields: Packed) -> torch.Tensor:
        return super().unpack(fields) * torch.nan


class Transposed(RawKeys):
    def unpack(self, fields: Packed) -> torch.Tensor:
        return super().unpack(fields).transpose(1, 2)


class Half(RawKeys):
    def unpack(self, fields: Packed) -> torch.Tensor:
        return super().unpack(fields).half()


class Narrow(RawKeys):
    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        return query[..., 1:]


class Raises(RawKeys):
    def unpack(self, fields: Packed) -> torch.Tensor:
        raise KeyError("k_codes")


MISTAKES: list[tuple[type[RawKeys], str, str]] = [
    (Missing, "pack", "pack returns no field 'k_raw', which is declared"),
    (Extra, "pack", "pack returns field 'k_more', which is not declared"),
    (Prefix, "fields", "field 'raw_k_raw' of Prefix does not start with 'k'"),
    (Shape, "pack", "pack returns field 'k_raw' of shape"),
    (NotFinite, "pack", "field 'k_raw' holds numbers that are not finite"),
    (Range, "pack", "field 'k_code' holds numbers that torch.uint8 can't"),
    (Divides, "finite", "keys that are all 0 are read back as numbers that are not finite"),
    (Grows, "finite", "keys that contain inf are read back as large as"),
    (Counts, "determinism", "packing the same tokens twice gives different bytes"),
    (Neighbours, "determinism", "a page's bytes depend on tokens of another page"),
    (NotRotated, "features", "query_features(q) . key_features(page) differs from q . unpack(page) by"),
    (States, "state", "fit returns torch.float32 of shape (2, 1, 64), not float32 of (2, 2, 64)"),
    (NotANumber, "unpack", "unpack returns keys that are not finite"),
    (
        Transposed,
        "unpack",
        "unpack returns keys as torch.float32 of shape (8, 64, 32), not torch.float32 of (8, 32, 64)",
    ),
    (Half, "unpack", "unpack returns keys as torch.float16 of shape (8, 32, 64), not torch.float32 of (8, 32, 64)"),
    (Narrow, "features", "query_features returns 63 numbers for a query, and key_features 64 for a key"),
    (Raises, "unpack", "KeyError: 'k_codes'"),
]


@pytest.mark.parametrize(("keys", "check", "sentence"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_a_mistake_is_named(keys: type[RawKeys], check: str, sentence: str) -> None:
    found = conform(Format("mine", "one mistake", keys, RawValues, {"W": 32}), 64)
    assert not found.passed
    assert sentence in found.faults[check], found.faults
    if check in ("fields", "pack", "unpack"):
        assert [*found.faults] == [check], "what is asked of such fields means nothing"
    assert found.key_error is None


ASKED = [m for m in MISTAKES if m[1] in ("fields", "pack", "unpack", "features")]


@pytest.mark.parametrize(("keys", "check", "sentence"), ASKED, ids=[m[0].__name__ for m in ASKED])
def test_a_server_asks_the_same_of_another_packages_codec(keys: type[RawKeys], check: str, sentence: str) -> None:
    page = Format("mine", "one mistake", keys, RawValues, {"W": 32}).bind(Geometry(64, 128))
    assert sentence.replace("(8, ", "(2, ") in (broken_promise(page) or "")


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_server_asks_holds_for_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were another package's. Calibrated formats can't be served."""
    monkeypatch.setattr(contract, "_foreign", lambda codec: True)
    for head_size in (64, 128):
        for block in (64, 128):
            page = FORMATS[name].bind(Geometry(head_size, FORMATS[name].settings().N or block))
            assert page.calibrated or broken_promise(page) is None


def test_a_server_does_not_ask_our_own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tests ask more. Options make classes of codecs, which are ours as well."""
    monkeypatch.setattr(contract, "wrong_fields", lambda page: "asked")
    asked = {n for n, f in FORMATS.items() if broken_promise(f.bind(Geometry(64, f.settings().N or 128)))}
    assert asked == set()
    page = Format("mine", "no mistake", type("Mine", (RawKeys,), {}), RawValues, {"W": 32}).bind(Geometry(64, 128))
    assert broken_promise(page) == "asked"


def test_kernels_that_read_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvq.eval.conformance import checks

    whole = checks.kernels_for

    def shifted(*arguments: Any) -> Any:
        kernels = whole(*arguments)

        def attend(fmt: Any, query: Any, pages: torch.Tensor, listed: Any, scale: float) -> Any:
            return kernels.attend_packed(fmt, query, pages, listed._replace(high=listed.high - 3), scale)

        return replace(kernels, attend_packed=attend)

    monkeypatch.setattr(checks, "kernels_for", shifted)
    found = conform(FORMATS["kivi2"], 64)
    assert "kernels differs from that over unpack(page) by" in found.faults["attention"]


def test_kernels_that_answer_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is not below the bound."""
    from vllm_kvq.eval.conformance import checks

    whole = checks.kernels_for

    def broken(*arguments: Any) -> Any:
        kernels = whole(*arguments)

        def attend(*more: Any) -> Any:
            out, lse = kernels.attend_packed(*more)
            return out * torch.nan, lse

        return replace(kernels, attend_packed=attend)

    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    monkeypatch.setattr(checks, "kernels_for", broken)
    assert "differs from that over unpack(page) by nan" in conform(FORMATS["kivi2"], 64).faults["attention"]


def test_constants_are_fitted_to_other_tokens() -> None:
    """Those that are packed would make the errors of calibrated formats look smaller than they are."""
    trial = Trial.of(FORMATS["klt3"], 64)
    own = trial.page.calibrated_on(Calibration(trial.query, trial.key, trial.value, trial.page.geometry.rope))
    assert own.geometry.constants is not None
    assert trial.page.geometry.constants is not None
    assert not torch.equal(own.geometry.constants.keys, trial.page.geometry.constants.keys)


def test_kernels_that_read_what_a_block_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvq.eval.conformance import checks

    whole = checks.kernels_for

    def all_of_it(*arguments: Any) -> Any:
        kernels = whole(*arguments)

        def attend(fmt: Any, query: Any, pages: torch.Tensor, listed: Any, scale: float) -> Any:
            return kernels.attend_packed(fmt, query, pages, listed._replace(high=0 * listed.high + fmt.N), scale)

        return replace(kernels, attend_packed=attend)

    monkeypatch.setattr(checks, "kernels_for", all_of_it)
    assert "never packed change the output" in conform(FORMATS["kivi2"], 64).faults["damage"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--formats", "kitty2:boost=half,lossless", "--head-size", "64,256"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[-1] for line in said.splitlines()[1:5]] == ["passed"] * 4
    assert "vllm-kvq eval MODEL --formats kitty2:boost=half,lossless,kitty2,kivi4,fp8 --out FOLDER" in said
    assert conformance.main(["--formats", "kitty2", "--head-size", "64"]) == 0
    assert " --formats kitty2,kivi4,fp8 --out" in capsys.readouterr().out
    assert conformance.main(["--formats", "oscar2", "--head-size", "80"]) == 1
    assert "oscar2, refused: oscar2 needs a Hadamard matrix of the whole head" in capsys.readouterr().out
    assert conformance.main(["--formats", "kivi2", "--json"]) == 0
    assert [row["head_size"] for row in json.loads(capsys.readouterr().out)] == [64, 80, 128]


@pytest.mark.parametrize(("name", "why"), [("kity2", "id you mean 'kitty2'"), ("fp8", "vLLM's own cache")])
def test_names_that_it_does_not_check(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        conformance.main(["--formats", name])
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_vllm_is_not_needed() -> None:
    command = "main(['conformance', '--formats', 'kivi4'])"
    code = f"import sys; sys.modules['vllm'] = None; from vllm_kvq.cli import main; {command}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("passed") == 3, done.stderr
