"""An evaluation measures a calibrated format with the constants that servers of the model have, whoever fitted them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import warm_engines
from plans import evaluate, plan

from proof.oracle.engines import forked
from vllm_kvq import cli
from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.reading import caches
from vllm_kvq.eval.results.result import READING
from vllm_kvq.formats.constants import Constants
from vllm_kvq.integration.plan.calibration import digest_of, read, write
from vllm_kvq.integration.preview.constants import Known

pytestmark = pytest.mark.engine
KLT = Choice("klt3")
READ = {"tasks": ("text",), "contexts": (400,), "count": 1, "regimes": (READING,)}
LONG = "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog; 12,345 times.\n" * 40


def started(model: str, cache: str, dtype: str, options: dict[str, Any]) -> tuple[str, int]:
    """In a process of its own: the constants in a server's start-up line, and how often it fitted any."""
    os.environ["XDG_CACHE_HOME"] = cache
    from proof.oracle.engines.engine import TracedEngine
    from vllm_kvq.integration.worker import report
    from vllm_kvq.integration.worker.calibration import fitting

    runs: list[int] = []
    own_run, own_line, lines = fitting._run, report.start_line, []

    def counted(*arguments: Any) -> Any:
        runs.append(1)
        return own_run(*arguments)

    def kept(*arguments: Any) -> str:
        lines.append(own_line(*arguments))
        return lines[-1]

    fitting._run, report.start_line = counted, kept
    arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28, "max_num_batched_tokens": 4096}
    TracedEngine(model, kv_cache_dtype="klt3", dtype=dtype, additional_config={"kvq": options}, **arguments)
    return lines[0].partition(" constants=")[2].partition(" ")[0], len(runs)


def kept_in(cache: Path) -> list[Path]:
    folder = cache / "vllm_kvq" / "calibration"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The cache that a server's first start has left, and the constants that its start-up line names."""
    cache = tmp_path_factory.mktemp("server")
    constants, runs = forked.call(started, str(model), str(cache), "float32", {})
    assert runs == 1
    return cache, constants


def test_without_a_file_they_are_those_that_a_server_would_fit(
    model: Path, server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and kept where the server keeps them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Known(str(model), "float32").digest("klt3", {}) == server[1]
    assert [file.name for file in kept_in(tmp_path)] == [file.name for file in kept_in(server[0])]
    assert read(kept_in(tmp_path)[0])[1] == server[1]


def test_a_file_is_read(model: Path, server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reading regime, with the constants of each layer; another file's constants are another measurement."""
    from vllm_kvq.integration.preview import constants as preview

    def never(*_: object) -> None:
        raise AssertionError("there is a file, so nothing has to be fitted")

    used: dict[int, Constants | None] = {}
    own = caches.bound

    def watched(captured: Any, layer: Any, *more: Any) -> Any:
        page = own(captured, layer, *more)
        used[layer.index] = page.geometry.constants
        return page

    monkeypatch.setattr(preview, "fitted", never)
    monkeypatch.setattr(caches, "bound", watched)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (source,) = kept_in(server[0])
    (there,) = (tmp_path / "vllm_kvq" / "calibration" / source.name,)
    there.parent.mkdir(parents=True)
    there.write_bytes(source.read_bytes())
    todo = plan(model, "klt3", **READ)
    (item,) = todo.sequences
    evaluate(tmp_path / "store", todo)
    assert digest_of({layer: of for layer, of in used.items() if of is not None}) == server[1]
    assert todo.servers.digest("klt2", {"W": 64}) == server[1]

    found, _ = read(there)
    turned = {layer: replace(of, keys=torch.flip(of.keys, [0])) for layer, of in found.items() if of.keys is not None}
    write(there, turned, _belongs(there))
    used.clear()
    again = plan(model, "klt3", **READ)
    assert again.key(KLT, item, READING) != todo.key(KLT, item, READING)
    assert again.key(Choice("kitty2"), item, READING) == todo.key(Choice("kitty2"), item, READING)
    evaluate(tmp_path / "store", again)
    assert digest_of({layer: of for layer, of in used.items() if of is not None}) == digest_of(turned) != server[1]


def _belongs(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return {name: value for name, value in opened.metadata().items() if name != "digest"}


def test_no_server_no_constants(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without figures, which says why."""
    from vllm_kvq.integration.preview import constants as preview
    from vllm_kvq.integration.preview.apart import Failed

    def failed(*_: object) -> None:
        raise Failed("no server starts today; come again tomorrow")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(preview, "fitted", failed)
    rows = evaluate(tmp_path / "store", plan(model, "klt3,kitty2", **READ)).rows
    problems = {row.label: row.problem for row in rows if not row.metrics}
    assert problems == {"klt3": "no server starts today; come again tomorrow"}


# -- the user's own text ----------------------------------------------------------------------------------------------
def test_a_server_serves_what_the_users_text_gave(
    model: Path, server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where it looks by itself, in place of what is there; and by name, which leaves nothing there."""
    text = tmp_path / "text.txt"
    text.write_text(LONG)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm_engines(monkeypatch)
    by_name = ["--out", str(tmp_path / "out")]
    assert cli.main(["calibrate", str(model), "--text", str(text), "--dtype", "float32", "--json", *by_name]) == 0
    assert kept_in(tmp_path) == []
    (named,) = json.loads(capsys.readouterr().out)["files"]
    assert named["file"] == str(tmp_path / "out" / "kvq.safetensors")
    assert named["constants"] == read(tmp_path / "out" / "kvq.safetensors")[1] != server[1]
    assert "--additional-config" in named["serve"]
    options = {"calibration": named["file"]}
    assert forked.call(started, str(model), str(tmp_path), "float32", options) == (named["constants"], 0)

    (source,) = kept_in(server[0])
    there = tmp_path / "vllm_kvq" / "calibration" / source.name
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_bytes(source.read_bytes())
    assert cli.main(["calibrate", str(model), "--text", str(text), "--dtype", "float32"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"klt2, klt3, klt4: constants={named['constants']}, fitted to {named['tokens']:,} tokens, are"
    )
    assert line.endswith(f"serve with them: vllm serve {model} --kv-cache-dtype klt2 --dtype float32")
    assert forked.call(started, str(model), str(tmp_path), "float32", {}) == (named["constants"], 0)


def test_each_servers_constants_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once for each format and its options: layers that are skipped have none."""
    asked: list[Any] = []

    def found(self: Known, server: Any) -> Any:
        asked.append((server.format, dict(server.options)))
        return {}, str(len(asked))

    monkeypatch.setattr(Known, "_found", found)
    known, skipped = Known("model", "float32"), {"skip_layers": [0]}
    assert [known.digest(*of) for of in (("klt3", {}), ("klt3", skipped), ("klt2", {}), ("klt3", {}))] == [*"1231"]
    assert asked == [("klt3", {}), ("klt3", skipped), ("klt2", {})]
