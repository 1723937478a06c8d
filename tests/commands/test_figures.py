"""What bench and eval print: ratios the right way up, verdicts on them, errors; from made-up times and tensors."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from vllm_kvq.bench import decode, prefill, slow, steps, timing
from vllm_kvq.bench.gpu import table as gpu
from vllm_kvq.bench.gpu.decode import Shape as GPUShape
from vllm_kvq.bench.servers import serve
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.bench.steps import Candidate, Shape
from vllm_kvq.bench.timing import Row
from vllm_kvq.cli.bench import attention
from vllm_kvq.cli.bench import decode as decode_command
from vllm_kvq.cli.bench import prefill as prefill_command
from vllm_kvq.cli.bench import serve as serve_command
from vllm_kvq.cli.bench import slow as slow_command
from vllm_kvq.cli.bench.arguments import recommended
from vllm_kvq.cli.eval import error as error_table
from vllm_kvq.eval.heads.synthetic import score_error


# -- times ------------------------------------------------------------------------------------------------------------
class Clock:
    """A clock that moves when a step is run."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, seconds: Callable[[int], float]) -> Callable[[], object]:
        """A step that takes this long when it is run for the nth time."""
        calls = iter(range(10**6))

        def run() -> None:
            self.now += seconds(next(calls))

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_ratios_are_times_as_fast(clock: Clock) -> None:
    """The median round's ratio: a round during which the machine slept changes nothing."""
    candidates = {
        "bf16": Candidate([clock.step(lambda i: 0.8 if i == 5 else 0.016)], 64_000_000),
        "fp8": Candidate([clock.step(lambda i: 0.010)], 32_000_000),
        "squat2": Candidate([clock.step(lambda i: 0.9 if i == 9 else 0.002)] * 2, 10_000_000),
    }
    rows = {row.name: row for row in timing.compare(candidates, 9, bandwidth=10e9)}
    assert rows["squat2"].ratio == pytest.approx({"bf16": 8.0, "fp8": 5.0})
    assert rows["bf16"].ratio == pytest.approx({"bf16": 1.0, "fp8": 0.625})
    assert (rows["squat2"].ms, rows["squat2"].best) == pytest.approx((2.0, 2.0))
    assert rows["squat2"].gb_per_s == pytest.approx(5.0)
    # a copy of ten million bytes takes one millisecond
    assert rows["squat2"].floor == pytest.approx(2.0)
    assert rows["squat2"].limit == pytest.approx({"bf16": 6.4, "fp8": 3.2})


def test_best_is_the_fastest_round(clock: Clock) -> None:
    steps = [clock.step(lambda i: 0.004 if i < 8 else 0.006)]
    row = timing.compare({"squat2": Candidate(steps, 1)}, 9, 1.0)[0]
    assert (row.best, row.ms) == pytest.approx((4.0, 6.0))
    assert row.ratio == {}


def test_bandwidth_counts_what_is_read_and_written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "seconds_per_step", lambda steps, repeats: 0.001)
    assert timing.copy_bandwidth(1_000_000, 3) == pytest.approx(1e9)


def test_a_row_says_what_only_memory_would_allow() -> None:
    """Bytes, the share of a copy's speed, and the ratio of the bytes next to the ratio of the times."""
    row = Row("squat2", 1.0, 0.9, 25_000_000, 1.25, {"bf16": 3.0, "fp8": 2.0}, {"bf16": 5.4, "fp8": 2.7})
    cells = dict(zip(attention.HEAD, attention.cells(row), strict=True))
    assert (cells["MB"], cells["GB/s"], cells["of copy"]) == ("25.0", "25.0", "80%")
    assert (cells["x bf16"], cells["limit"], cells["x fp8"]) == ("3.00", "5.40", "2.00")
    assert attention.cells(Row("kivi2", 1.0, 1.0, 1, 1.0))[-3:] == ["", "", ""]


def test_caches_exceed_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "last_level_cache", lambda: 32 << 20)
    shape = Shape(1024, 1, 32, 8, 128, 128)
    assert [shape.caches(n << 20) for n in (1, 3, 32, 64, 128)] == [64, 22, 2, 1, 1]
    assert replace(shape, rotate=4).caches(1 << 20) == 4


def test_both_sides_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of bytes for each side, and a place of its own for each step."""
    monkeypatch.setattr(steps, "last_level_cache", lambda: 1 << 20)
    shape = Shape(256, 1, 4, 1, 64, 128)
    for candidate in (steps.vllm_candidate(shape, "auto"), steps.kvq_candidate(shape, "kitty2")):
        assert len(candidate.steps) == -(-(2 << 20) // candidate.nbytes) > 4
        places = {
            tensor.data_ptr()
            for step in candidate.steps
            for tensor in (step.__defaults__ or ())  # type: ignore[attr-defined]
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 2
        }
        assert len(places) >= len(candidate.steps)


@pytest.mark.parametrize(("least", "status"), [(0.0, 0), (1.9, 0), (2.1, 1)])
def test_decode(
    least: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a second for each of bf16's tokens, a quarter for ours; the prompt takes its own time and does not count."""
    monkeypatch.setattr(decode, "_engine", lambda model, dtype, *_: 0.5 if dtype == "auto" else 0.25)
    monkeypatch.setattr(decode, "_seconds", lambda each, prompts, tokens: 7 + each * tokens)
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("m", "config.json").touch()
    monkeypatch.setattr("sys.argv", ["bench", "m", "--batch", "4", "--min-ratio", str(least)])
    assert decode_command.main() == status
    printed = capsys.readouterr().out
    assert printed.startswith(f"{recommended()}: 16 tokens/s, bf16 8 tokens/s, ratio 2.00 ")
    assert (f"slower than {least} of bf16: {recommended()}" in printed) == bool(status)
    assert decode_command.main(["m", "--batch", "4", "--min-ratio", str(least), "--json"]) == status
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == {"format": recommended(), "tokens_per_second": 16.0, "bf16_tokens_per_second": 8.0, "ratio": 2.0}


@pytest.mark.engine
@pytest.mark.parametrize(("on_cpu", "given", "nbytes"), [(True, None, 1 << 30), (True, "7", None), (False, None, None)])
def test_an_engine_of_decode_leaves_memory_to_the_other(
    on_cpu: bool, given: str | None, nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr("vllm.LLM", lambda model, **arguments: arguments)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given)
    assert decode._engine("m", "auto", decode.Load(1, 1, 1, 1), {})["kv_cache_memory_bytes"] == nbytes


def test_decode_holds_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16's and one format's, even when an engine's parts refer to each other."""
    alive: weakref.WeakSet[Engine] = weakref.WeakSet()
    most = 0

    class Engine:
        def __init__(self, *_: object) -> None:
            nonlocal most
            self.itself = self
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(decode, "_engine", Engine)
    monkeypatch.setattr(decode, "_seconds", lambda engine, prompts, tokens: float(tokens))
    formats = [(name, {}) for name in ("kitty2", "squat2", "klt3")]
    assert len([*decode.rows("m", formats, decode.Load(1, 1, 1, 1))]) == 3
    assert most == 2


def test_slow_tables() -> None:
    """Ours takes 4 ms with default options and 8 with others, bf16 2."""

    def row(name: str, ms: float) -> Row:
        return Row(name, ms, ms, 1, 1.0, {"bf16": 2 / ms})

    variants = [slow.label(name, options) for name, options in slow.OPTIONS]
    rows = [row("bf16", 2.0), *(row(name, 4.0) for name, _ in slow.OPTIONS), *(row(name, 8.0) for name in variants)]
    lines = slow_command.markdown(slow_command.option_table(rows)).splitlines()
    assert lines[0] == "| format | option | times bf16 | times slower than its defaults |"
    assert lines[2] == "| `squat2` | `group: 16` | 0.25 | 2.0 |"
    assert len(lines) == 2 + len(slow.OPTIONS)
    table = slow_command.head_table(
        {80: [row("bf16", 2.0), row("squat2", 4.0)], 96: [row("bf16", 2.0), row("squat2", 1.0)]}
    )
    assert slow_command.markdown(table).splitlines() == [
        "| times bf16 | d = 80 | d = 96 |",
        "| --- | --- | --- |",
        "| `squat2` | 0.50 | 2.00 |",
    ]


def test_serve_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes half as long; cold first tokens and warm steps are not mixed up."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def turn(url: str, prompts: list[list[int]], tokens: int) -> serve.Turn:
        warm = (url, tuple(prompts[0])) in seen
        seen.append((url, tuple(prompts[0])))
        scale = 1.0 if url == "plain" else 0.5
        return serve.Turn(scale * (0.001 if warm else 0.4), scale * 0.02)

    monkeypatch.setattr(serve, "take_turn", turn)
    cell = serve.measure(("plain", "packed"), "squat2", 64, 2, serve.Load([64], [2], 8, 3, 2))
    assert (cell.ratio, cell.first_ratio) == pytest.approx((2.0, 2.0))
    assert (cell.plain, cell.packed) == (serve.Turn(0.4, 0.02), serve.Turn(0.2, 0.01))
    # half of the step is what the context costs, and its kernel is four times as fast: 1 / (1/2 + 1/8)
    words = serve_command.line(serve.Row("squat2", cell, 0.5, 4.0)).split()
    assert words == [
        "64",
        "2",
        "20.00",
        "10.00",
        "2.00",
        "100.0",
        "200.0",
        "400",
        "200",
        "2.00",
        "50%",
        "4.00",
        "1.60",
        "2.00",
    ]
    assert serve_command.line(serve.Row("squat2", cell, None, 4.0)).split()[-2:] == ["2.00", "4.00"]


def test_serve_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part of bf16's step that was not there at the shortest context."""

    def measured(urls: Any, name: str, context: int, batch: int, load: Any) -> serve.Cell:
        plain = serve.Turn(0.4, 0.010 if context == 64 else 0.040)
        return serve.Cell(context, batch, plain, serve.Turn(0.2, 0.010), 1.0, 2.0)

    monkeypatch.setattr(serve, "measure", measured)
    monkeypatch.setattr(serve, "both", lambda *_: None)
    monkeypatch.setattr(serve, "server", lambda *_: MagicMock())
    load = serve.Load([256, 64], [2], 8, 1, 1)
    found = [*serve.against("squat2", tmp_path, MagicMock(), load, {(64, 2): 2.0, (256, 2): 3.0}, tmp_path)]
    rows = [row.document() for row in found]
    assert [(row["context"], row["share"], row["kernel"]) for row in rows] == [(64, None, 2.0), (256, 0.75, 3.0)]
    assert [(row["plain"]["step"], row["packed"]["step"]) for row in rows] == [(0.010, 0.010), (0.040, 0.010)]
    first, second = (serve_command.line(row).split() for row in found)
    assert (first[0], second[0]) == ("64", "256")
    assert second[-4:] == ["75%", "3.00", "2.00", "4.00"]


def test_serve_kernel(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "hidden_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 3})
    )
    monkeypatch.setattr(serve, "vllm_candidate", lambda shape, _: Candidate([clock.step(lambda i: 0.012)], 9))
    monkeypatch.setattr(serve, "kvq_candidate", lambda shape, *_: Candidate([clock.step(lambda i: 0.004)], 3))
    assert serve.kernel_ratio("squat2", tmp_path, 64, 1, 3) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("head_dim", "missing", "sentence"),
    [
        (100, None, "config.json: vLLM's CPU attention has no heads of 100 channels"),
        (32, None, "kitty2 can't serve .*: .*32"),
        (64, "no AMX here", "^no AMX here$"),
    ],
)
def test_serve_refuses_before_anything_starts(
    head_dim: int, missing: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": head_dim}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    monkeypatch.setattr("vllm_kvq.bench.vllm_build.why_not", lambda: missing)
    monkeypatch.setattr(serve, "compare", lambda *_: pytest.fail("a kernel was measured"))
    monkeypatch.setattr(serve, "server", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(ServerError, match=sentence) as caught:
        next(serve.rows([("kitty2", {})], tmp_path, serve.Load([64], [1], 8, 1, 1), tmp_path))
    assert "\n" not in str(caught.value)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """A prompt's update takes 0.3 seconds, 0.1 of them the fit, our attention 1 second."""
    packed = MagicMock()
    packed.fit.return_value, packed.update.return_value, packed.attend.return_value = 0.1, 0.3, 1.0
    monkeypatch.setattr(prefill, "Packed", lambda *_: packed)
    monkeypatch.setattr(prefill, "seconds", lambda call: call())
    return packed


def test_prefill(one_layer: MagicMock) -> None:
    """vLLM's attention takes 2 seconds."""
    q, k, v = (torch.zeros(64, heads, 64) for heads in (4, 2, 2))
    plain: Any = SimpleNamespace(attend=lambda: 2.0)
    row = prefill_command.line(prefill.prompt_row("squat2", q, k, v, plain, 3, {}))
    assert "prompt of 64: fit   100.0 ms  pack   200.0 ms" in row
    assert "vLLM  2000.0 ms, ours  1000.0 ms" in row
    assert row.endswith("fit   5.0% + pack  10.0% of vLLM's")
    chunk = prefill.chunk_row("squat2", q, k, v, 128, plain, 3, {})
    assert prefill_command.line(chunk).endswith(" 2.00 times vLLM's speed")


def test_gpu_rows() -> None:
    """1 us against 3 us for bf16, 2 for fp8; half a megabyte a microsecond is half of what a copy reads and writes."""
    row = gpu.line("squat2", GPUShape(8, 1024), 1e-6, 3e-6, 2e-6, 1.5e-6, 500_000, 1e12).split()
    assert row == ["squat2", "8", "1024", "1.0", "3.0", "2.0", "1.5", "3.00", "2.00", "0.5", "50%"]
    assert gpu.line("x", GPUShape(1, 1), 1e-6, 3e-6, None, 1e-6, 1, 1e12).count("n.m.") == 2
    text = gpu.summary("squat2", 2, [(1000, 5e-6, 4e-6), (2000, 6e-6, 6e-6), (4000, 10e-6, 12e-6)])
    assert text.split()[-3:] == ["1.000", "break-even", "2000"]
    assert gpu.summary("squat2", 1, [(1000, 5e-6, 4e-6)]).endswith("break-even none")


# -- errors -----------------------------------------------------------------------------------------------------------
def test_score_error_is_relative() -> None:
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(20, 4, 64, generator=g), torch.randn(30, 2, 64, generator=g)
    assert score_error(query, key, key) == 0
    assert score_error(query, key, 1.1 * key) == pytest.approx(0.1, rel=1e-4)
    assert score_error(query, key, torch.zeros_like(key)) == pytest.approx(1.0)
    # an error that no query sees does not count; query heads 0 and 1 share KV head 0
    query[:, :2, 5] = 0
    wrong = key.clone()
    wrong[:, 0, 5] += 100
    assert score_error(query, key, wrong) < 1e-6
    wrong[:, 1, 5] += 100
    assert score_error(query, key, wrong) > 1


def test_the_error_table_measures_on_queries_that_were_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    halves: list[torch.Tensor] = []

    def roundtrip(
        name: str, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor, turned: object, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert (name, turned, options) == ("squat2", None, {"calibration": None, "g": 16})
        halves.append(query)
        return 1.25 * key, value

    def measured(query: torch.Tensor, key: torch.Tensor, hat: torch.Tensor) -> float:
        seen = halves[-1]
        assert len(query) == len(seen) == len(key) // 2
        assert not torch.equal(query, seen)
        return score_error(query, key, hat)

    monkeypatch.setattr(error_table, "roundtrip", roundtrip)
    monkeypatch.setattr(error_table, "score_error", measured)
    assert error_table.error("squat2", {"blocks": 4}, 64, False) == pytest.approx(0.25, rel=1e-4)
    assert len(halves) == error_table.SEEDS
    assert len({float(x.sum()) for x in halves}) == error_table.SEEDS


def test_the_error_table_notices_a_planted_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same format with slightly wrong keys has a larger error in its cell."""
    healthy = error_table.error("kivi4", {}, 64, False)
    real = error_table.roundtrip

    def off(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = real(*args, **options)
        return key + 0.05 * key.abs(), value

    monkeypatch.setattr(error_table, "roundtrip", off)
    assert error_table.error("kivi4", {}, 64, False) > 1.3 * healthy
