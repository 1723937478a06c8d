"""Files that others wrote: whatever they contain, the answer is what was asked for or one sentence, and comes soon."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof.fuzz import main as fuzz
from proof.fuzz.case import MAX_LEN, MODEL, Case
from proof.oracle.trace import Picture, Request, Trace
from vllm_kvq.bench.servers import serve
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.formats import FORMATS

SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=9), x, max_size=4), max_leaves=9
)
GOOD: dict[str, Any] = {
    "setup": {"format": "squat2", "block_size": 64, "options": {"W": 32}, "pool": 1.5, "policy": "priority"},
    "traces": [{"requests": [{"name": "r", "prompt": [10, 11], "max_tokens": 3, "stop": ["a"]}], "reset": True}],
}
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "num_hidden_layers": 2}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places where a part of a JSON value may be replaced."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, part in inside for p in places(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


def spoiled(value: Any) -> st.SearchStrategy[Any]:
    """The value with one of its parts replaced, or with another field."""
    part = st.sampled_from(places(value))
    return st.one_of(
        st.builds(changed, st.just(value), part, JSON),
        st.builds(lambda key, new: {**value, key: new}, st.text(max_size=9), JSON),
        JSON,
    )


def refused(make: Callable[[], Any]) -> Any:
    """The result, or None if it was refused in a sentence."""
    try:
        return make()
    except ValueError as error:
        sentence = str(error)
    assert sentence
    assert "\n" not in sentence
    return None


# -- cases of the fuzzer ----------------------------------------------------------------------------------------------
def test_a_good_case() -> None:
    case = Case.from_json(GOOD)
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


@settings(max_examples=400)
@given(spoiled(GOOD))
def test_any_json_in_the_place_of_a_case(data: Any) -> None:
    case = refused(lambda: Case.from_json(data))
    if case is not None:
        # what is accepted can be run, and written again
        assert case.traces[0].reset
        assert all(len(r.prompt) + r.max_tokens <= MAX_LEN for t in case.traces for r in t.requests)
        assert case.setup.arguments("draft")["block_size"] % 32 == 0
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


WRONG = {
    ("setup", "format"): ["squat9", 5, None, ["squat2"], "auto\n"],
    ("setup", "block_size"): [0, -64, 33, 64.0, True, "64", None],
    ("setup", "options"): [[], 3, {"W": 33}, {"rank": 5}, {"r": "5"}, None],
    ("setup", "pool"): [0, -1.0, "2", True, [], float("nan"), float("inf")],
    ("setup", "policy"): ["lifo", 1, None, []],
    ("setup",): [None, [], 3, {}, {"format": "squat2", "engine": 1}],
    ("traces",): [None, [], {}, 3, [[]], [{}], [{"requests": []}], [{"requests": [{}]}], "traces"],
    ("traces", 0, "reset"): [1, None, "true"],
    ("traces", 0, "requests", 0, "prompt"): [[], None, "ab", [1.5], [-1], [True], [MODEL["vocab"]], [10] * MAX_LEN],
    ("traces", 0, "requests", 0, "max_tokens"): [0, -1, 2.0, "3", None, True, MAX_LEN, 10**30],
    ("traces", 0, "requests", 0, "name"): [1, None, []],
    ("traces", 0, "requests", 0, "pictures"): [5, [5], [{}], [{"seed": 1, "at": 1, "tokens": 1}]],
    ("traces", 0, "requests", 0, "stop"): ["a", [1], [""], None, 7],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in WRONG.items() for value in values], ids=repr
)
def test_a_case_with_one_wrong_part(
    path: tuple[Any, ...], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case").write_text(json.dumps(changed(GOOD, path, value)))
    with pytest.raises(SystemExit) as stop:
        fuzz.main(["--replay", str(tmp_path / "case")])
    assert stop.value.code == 2
    assert "holds no case: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 10**6, b'{"a":' * 10**5, b"1" * 10**5, b"NaN", b"null", b"\0" * 100],
    ids=lambda x: repr(x[:8]),
)
def test_files_that_are_no_json(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "case").write_bytes(text)
    with pytest.raises(SystemExit) as stop:
        fuzz.main(["--replay", str(tmp_path / "case")])
    assert stop.value.code == 2
    assert "holds no case: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "pictures",
    [
        [(1, 1, 3)],
        [(1, 2, 2)],
        [(1, 0, 2)],
        [(1, -1, 1)],
        [(-1, 1, 2)],
        [(1, 1, 0)],
        [(1, 1, 2), (2, 2, 1)],
        [(1.0, 1, 2)],
    ],
    ids=repr,
)
def test_pictures_that_no_tokens_stand_for(pictures: list[tuple[int, int, int]]) -> None:
    good = Request("r", (10, 3, 3, 11), 1, pictures=(Picture(1, 1, 2),))
    assert Trace.from_json(json.loads(json.dumps(Trace((good,)).to_json()))) == Trace((good,))
    with pytest.raises(ValueError, match="picture"):
        replace(good, pictures=tuple(Picture(*p) for p in pictures))


def test_requests_of_one_name() -> None:
    request = GOOD["traces"][0]["requests"][0]
    with pytest.raises(ValueError, match="the same name"):
        Case.from_json(changed(GOOD, ("traces", 0, "requests"), [request, request]))


# -- a checkpoint of `bench serve MODEL` ----------------------------------------------------------------------------
@settings(max_examples=300)
@given(spoiled(SHAPE))
def test_any_json_in_the_place_of_a_config(data: Any) -> None:
    shape = refused(lambda: serve.model_shape(data, 64, 1))
    if shape is not None:
        assert shape.query_heads % shape.heads == 0
        assert min(shape.heads, shape.head_size, shape.rotate) > 0


@pytest.mark.parametrize("head_dim", [None, 64])
def test_a_good_config(head_dim: int | None) -> None:
    shape = serve.model_shape({**SHAPE, "head_dim": head_dim}, 64, 1)
    assert (shape.query_heads, shape.heads, shape.head_size, shape.rotate) == (4, 2, 64, 2)


@pytest.mark.parametrize(
    "text",
    [None, b"", b"[", b"\xff", b"[]", b"{}", b'{"num_attention_heads": "4"}', b"[" * 10**6],
    ids=lambda x: repr(x)[:9],
)
def test_a_folder_that_is_no_checkpoint(text: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ServerError) as caught:
        serve.kernel_ratio("squat2", tmp_path, 64, 1, 1)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(caught.value)


# -- vllm serve --config FILE -----------------------------------------------------------------------------------------
def test_any_options_in_a_file(tmp_path: Path) -> None:
    """As vLLM passes them to us: YAML's mappings as JSON."""
    yaml = pytest.importorskip("yaml", reason="comes with vLLM")
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvq.integration.plan.options import Options

    parser, path = FlexibleArgumentParser(), tmp_path / "c.yaml"
    options = st.dictionaries(st.sampled_from(["W", "S", "r", "lam", "g", "keys", "skip_layers", "N", "x"]), JSON)

    @settings(max_examples=150)
    @given(st.sampled_from(sorted(FORMATS)), options | JSON)
    def read(name: str, kvq: Any) -> None:
        path.write_text(yaml.safe_dump({"kv-cache-dtype": name, "additional-config": {"kvq": kvq}}), encoding="utf-8")
        arguments = parser.load_config_file(str(path))
        config = SimpleNamespace(
            additional_config=json.loads(arguments[arguments.index("--additional-config") + 1]),
            cache_config=SimpleNamespace(cache_dtype=arguments[1]),
        )
        got = refused(lambda: Options.of(config))
        assert got is None or isinstance(got, Options)

    read()
