"""Which formats a command takes if its user names none: those of the table, including new ones."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from vllm_kvq.eval.peers import PEERS
from vllm_kvq.formats import FORMATS, table
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import Format, suite

DEFAULTS = {
    "calibrate": "public",
    "eval.heads": "public",
    "eval.model": "usual",
    "eval.answers": "usual",
    "eval.humaneval": "usual",
}
"""A command's module in vllm_kvq/cli -> its suite."""
BENCHES = ("attention", "decode", "prefill", "serve")


def named(module: str) -> list[str]:
    """The formats that a command takes by default."""
    action = formats_of(module)
    return chosen(action, action.default)


def formats_of(module: str) -> argparse.Action:
    parser: argparse.ArgumentParser = importlib.import_module(f"vllm_kvq.cli.{module}").parser()
    (action,) = (a for a in parser._actions if a.dest == "formats")
    return action


def chosen(action: argparse.Action, text: str) -> list[str]:
    """The formats that the command makes of its argument."""
    assert callable(action.type)
    return [choice.label for choice in action.type(text)]


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Callable[[Format], None]:
    """new(format): in the table with the built-in ones."""
    built_in = table._built_in()

    def put(fmt: Format) -> None:
        monkeypatch.setattr(table, "_built_in", lambda: {**built_in, fmt.name: fmt})

    return put


@pytest.mark.parametrize(("module", "which"), DEFAULTS.items())
def test_a_default_is_a_suite(module: str, which: str) -> None:
    baselines = ["fp8"] if which == "usual" else []
    assert named(module) == [*suite(which), *baselines]
    assert "kitty2" in named(module)


def test_the_usual_formats_are_those_that_are_recommended() -> None:
    """The first is the recommended one, which `bench` takes by default; KIVI is the baseline."""
    usual = suite("usual")
    recommended = BUDGETS[RECOMMENDED].formats
    assert usual[0] == recommended[0]
    assert {*recommended} <= {*usual}
    of_budgets = {name for budget in BUDGETS.values() for name in budget.formats}
    assert {FORMATS[name].keys.name for name in {*usual} - of_budgets} == {"kivi"}
    for name in BENCHES:
        action = formats_of(f"bench.{name}")
        assert chosen(action, action.default) == [usual[0]]


@pytest.mark.parametrize(("module", "which"), DEFAULTS.items())
def test_a_new_format_is_tried(module: str, which: str, new: Callable[[Format], None]) -> None:
    made = replace(FORMATS["squat2"], name="brand_new", usual=None)
    new(made)
    assert ("brand_new" in named(module)) == (which == "public")
    new(replace(made, usual=0))
    assert "brand_new" in named(module)
    assert named(module)[0] == ("brand_new" if which == "usual" else "squat2")
    new(replace(made, usual=0, public=False))
    assert "brand_new" not in named(module)


@pytest.mark.parametrize("name", BENCHES)
def test_benches_know_it(name: str, new: Callable[[Format], None]) -> None:
    new(replace(FORMATS["squat2"], name="brand_new", usual=0))
    action = formats_of(f"bench.{name}")
    assert chosen(action, "all") == [*suite("public")]
    assert "brand_new" in chosen(action, "all")
    assert chosen(action, "kivi2,brand_new") == ["kivi2", "brand_new"]
    assert chosen(action, action.default) == ["brand_new"]


def test_gpu_bench_has_what_kernels_serve(new: Callable[[Format], None]) -> None:
    from vllm_kvq.bench.gpu import decode as gpu

    new(replace(FORMATS["polar4"], name="brand_new"))
    found = [*gpu.formats()]
    assert {"squat2", "kitty2", "qjl3", "polar4", "brand_new"} <= {*found}
    # PyTorch computes these on a GPU
    assert not {"polar4_v16", *PEERS} & {*found}


def test_suites() -> None:
    assert suite("public") == tuple(name for name, fmt in FORMATS.items() if fmt.public)
    usual = suite("usual")
    places = [FORMATS[name].usual for name in usual]
    assert places == sorted({*places}, key=lambda place: place or 0)
    assert 3 <= len(usual) <= 6
    methods = suite("methods")
    assert {FORMATS[name].keys for name in methods} == {FORMATS[name].keys for name in suite("public")}
    assert len({FORMATS[name].keys.name for name in methods}) == len(methods)
    assert {"squat2", "kivi2", "polar4"} <= {*methods}
    with pytest.raises(ValueError, match="suite 'best' is not one of public, usual, methods"):
        suite("best")
