"""Formats of other packages: found through their entry points, refused in a sentence, and harmless to the others."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vllm_kvq import FORMATS, roundtrip
from vllm_kvq.cli.eval import error as error_table
from vllm_kvq.formats import Geometry, get_format, table
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.table import Format

Install = Callable[..., None]
BUILT_IN = list(FORMATS)

IMPORTS = """
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.methods.values import TokenValues

class Keys(ChannelKeys):
    name = "twice"
    title = "per channel, times two"
    options = (*ChannelKeys.options, Option("times", "a factor", 2, low=1, high=9))

    def __init__(self, geometry, options):
        super().__init__(geometry, options)
        self.times = options["times"]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(package, code, entry point's value): as pip leaves it, on the path of this process."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, code: str, point: str | None = None, value: str = "FORMAT") -> None:
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm_kvq.formats]\n{point or package} = {package}:{value}\n")
        sys.modules.pop(package, None)
        importlib.invalidate_caches()
        table.third_parties.cache_clear()

    yield put
    monkeypatch.undo()
    table.third_parties.cache_clear()
    assert list(FORMATS) == BUILT_IN


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as caught:
        get_format(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_format_and_its_options(install: Install) -> None:
    install("kvq_one", IMPORTS + 'FORMAT = Format("one", "First", Keys, TokenValues, {"key_bits": 4, "times": 3})')
    assert list(FORMATS) == [*BUILT_IN, "one"]
    assert len(FORMATS) == len(BUILT_IN) + 1
    fmt = FORMATS["one"].bind(Geometry(64, 64))
    assert (fmt.keys.times, fmt.keys.bits, fmt.values.bits) == (3, 4, 2)  # type: ignore[attr-defined]
    assert FORMATS["one"].bind(Geometry(64, 64), {"times": 4}).keys.times == 4  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="option 'times' is 10; it takes a whole number from 1 to 9"):
        FORMATS["one"].settings({"times": 10})
    with pytest.raises(ValueError, match=r"option 'times' is not read by squat2 .* it belongs to twice"):
        FORMATS["squat2"].settings({"times": 3})
    with pytest.raises(ValueError, match=r"unknown kvq option 'factor'; known options are .*\btimes\b"):
        FORMATS["squat2"].settings({"factor": 3})
    x = torch.randn(40, 2, 64)
    assert (roundtrip("one", x, x, times=2)[0] - x).norm() < 0.3 * x.norm()
    assert ("one", "one", {}) in error_table.rows()
    assert "one" in refusal("two")


def test_its_codec_in_a_built_in_format_and_the_other_way_round(install: Install) -> None:
    install("kvq_one", IMPORTS + 'FORMAT = Format("one", "First", Keys, TokenValues, {"times": 3})')
    fmt = FORMATS["squat4"].bind(Geometry(64, 64), {"keys": "twice", "times": 5})
    assert (type(fmt.keys).__name__, fmt.keys.bits, fmt.keys.times) == ("Keys", 4, 5)  # type: ignore[attr-defined]
    # the default of `one` belongs to its own codec
    assert FORMATS["one"].bind(Geometry(64, 64), {"keys": "qjl"}).settings.get("times") is None
    with pytest.raises(ValueError, match=r"option 'keys' is 'three'; it takes one of \[.*'kitty', 'klt', 'twice'\]"):
        FORMATS["squat2"].settings({"keys": "three"})


def test_a_tuple_of_formats(install: Install) -> None:
    several = 'ALL = Format("one", "First", Keys, TokenValues), Format("two", "Second", Keys, TokenValues, {"W": 64})'
    install("kvq_two", IMPORTS + several, value="ALL")
    assert list(FORMATS)[-2:] == ["one", "two"]
    assert FORMATS["two"].settings().W == 64


BROKEN = {
    "raise RuntimeError('no licence')": "RuntimeError: no licence",
    "raise SystemExit(1)": "SystemExit: 1",
    "import there_is_no_such_module": "ModuleNotFoundError: No module named 'there_is_no_such_module'",
    "OTHER = 1": "AttributeError: module 'kvq_bad' has no attribute 'FORMAT'",
    "FORMAT = 1": "is neither a Format nor a tuple of them",
    "FORMAT = ()": "is neither a Format nor a tuple of them",
    IMPORTS + "FORMAT = Format('Bad-Name', '', Keys, TokenValues)": "is not made of lowercase letters",
    IMPORTS + "FORMAT = Format('bad', '', Keys, TokenValues, {'r': 5})": "sets option 'r', which its codecs don't",
    IMPORTS + "FORMAT = Format('bad', '', Keys, TokenValues, {'times': 99})": "option 'times' is 99",
    IMPORTS + "Keys.options = (Option('W', ''),)\nFORMAT = Format('bad', '', Keys, TokenValues)": "another meaning",
    IMPORTS + "Keys.options = (Option('group', ''),)\nFORMAT = Format('bad', '', Keys, TokenValues)": "another meaning",
}


@pytest.mark.parametrize("code", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_package(code: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, the same sentence when its name is used, and everything else works."""
    install("kvq_bad", code, "bad")
    install("kvq_one", IMPORTS + 'FORMAT = Format("one", "First", Keys, TokenValues)')
    with caplog.at_level(logging.WARNING):
        assert list(FORMATS) == [*BUILT_IN, "one"]
    assert BROKEN[code] in refusal("bad")
    assert refusal("bad").startswith("KV cache format 'bad' (kvq_bad:FORMAT of kvq_bad) ")
    assert [record.message for record in caplog.records] == [refusal("bad")]


@pytest.mark.wide
@pytest.mark.engine
def test_what_vllm_says_of_a_broken_package(install: Install, tmp_path: Path) -> None:
    """The sentence is logged before vLLM's refusal of the name, and sound packages are among vLLM's choices."""
    pytest.importorskip("vllm")
    install("kvq_bad", "raise RuntimeError('no licence')", "bad")
    install("kvq_one", IMPORTS + 'FORMAT = Format("one", "First", Keys, TokenValues)')
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [Path(sys.executable).parent / "vllm", "serve", "x", "--kv-cache-dtype", "bad"],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode != 0
    sentence = "KV cache format 'bad' (kvq_bad:FORMAT of kvq_bad) can't be imported: RuntimeError: no licence"
    assert run.stderr.count(sentence) == 1
    choices = run.stderr.partition("invalid choice: 'bad'")[2]
    assert "'one'" in choices
    assert "'squat2'" in choices


def test_built_in_formats_need_no_other_package(install: Install) -> None:
    """A built-in format without options does not have to wait for other packages to be imported."""
    install("kvq_slow", "")
    assert FORMATS["squat2"].bind(Geometry(64, 64), {"r": 8}).name == "squat2"
    assert "kvq_slow" not in sys.modules


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ('Format("squat2", "", Keys, TokenValues)', "the name is that of a built-in format"),
        ('Format("fp8", "", Keys, TokenValues)', "the name is one of vLLM's own KV cache dtypes"),
        ('Format("kvq3", "", Keys, TokenValues)', "the name is that of a budget"),
        ('Format("bad", "", type("K", (Keys,), {"name": "squat"}), TokenValues)', "another key codec has the name"),
        ('Format("bad", "", Keys, type("V", (TokenValues,), {}))', "another value codec has the name 'token'"),
    ],
)
def test_names_that_are_taken(declared: str, reason: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    built_in = FORMATS["squat2"]
    install("kvq_bad", f"{IMPORTS}FORMAT = {declared}", "bad")
    with caplog.at_level(logging.WARNING):
        assert list(FORMATS) == BUILT_IN
    assert reason in caplog.text
    assert FORMATS["squat2"] is built_in
    name = declared.split('"')[1]
    if name != "squat2":
        assert reason in refusal(name)


def test_two_packages_with_one_name(install: Install) -> None:
    """It is ambiguous which one is meant, so neither is used."""
    for package in ("kvq_one", "kvq_two"):
        code = IMPORTS.replace('"twice"', f'"{package}"') + 'FORMAT = Format("same", "", Keys, TokenValues)'
        install(package, code)
    assert list(FORMATS) == BUILT_IN
    assert "has the same name" in refusal("same")
    assert all(package in refusal("same") for package in ("kvq_one", "kvq_two"))


def test_the_names_that_vllm_has() -> None:
    cache = pytest.importorskip("vllm.config.cache")
    own = [*getattr(cache, "KV_CACHE_DTYPES", cache.CacheDType.__args__)]
    assert {name for name in own if name not in {*FORMATS, *BUDGETS}} <= {*table.VLLM_DTYPES}


@pytest.mark.parametrize("bad", ["Squat2", "", "a b", "2x", "a-b"])
def test_names_of_formats(bad: str) -> None:
    with pytest.raises(ValueError, match="lowercase letters"):
        Format(bad, "", FORMATS["squat2"].keys, FORMATS["squat2"].values)
