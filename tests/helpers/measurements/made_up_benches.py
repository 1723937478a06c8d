"""Every benchmark that takes --out, run with made-up measurements: what it writes can be known, and takes no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kvq import cli
from vllm_kvq.bench import decode, prefill, slow, vllm_build
from vllm_kvq.bench.gpu import chunks, table
from vllm_kvq.bench.gpu.results import Results
from vllm_kvq.bench.servers import capacity, serve
from vllm_kvq.bench.servers.capacity import Found
from vllm_kvq.bench.timing import Row
from vllm_kvq.cli.bench import slow as slow_command
from vllm_kvq.cli.bench.report import Report
from vllm_kvq.cli.page.document import Page
from vllm_kvq.cli.page.plots import Drawn
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture

ROOT = Path(__file__).parents[3]
H200 = ROOT / "docs" / "results" / "gpu-nvidia-h200.csv"
MODEL = "a <b>model & <script>"
"""The name of a model's folder."""
REFUSED = "flash_attn: </td><script>alert(1)</script>&amp;"
"""What a kernel may say when it refuses a GPU."""
NINE = "kitty2,squat2,polar4,innerq2,kivi2,kivi4,klt3,qjl3,squat2:W=64"
"""One more than a picture names."""
Words = list[str]


def folder(within: Path) -> Path:
    """A checkpoint as far as benchmarks look into it before they measure."""
    path = within / MODEL
    path.mkdir(exist_ok=True)
    (path / "config.json").touch()
    return path


def speed(name: str) -> float:
    """How many times as fast as bf16 everything of this name is."""
    return 1 + len(name) / 8


def _decode(within: Path, patch: pytest.MonkeyPatch) -> Words:
    def rows(model: str, formats: Sequence[tuple[str, Any]], load: decode.Load) -> Iterator[decode.Row]:
        return (decode.Row(name, 100 * speed(name), 100, speed(name)) for name in map(_label, formats))

    patch.setattr(decode, "rows", rows)
    return ["decode", str(folder(within)), "--formats", NINE, "--min-ratio", "1.7"]


def _label(chosen: tuple[str, dict[str, Any]]) -> str:
    name, options = chosen
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def _on_one_layer(patch: pytest.MonkeyPatch) -> None:
    def prompt(name: str, q: torch.Tensor, k: Any, v: Any, plain: Any, rounds: int, options: Any) -> prefill.PromptRow:
        return prefill.PromptRow(_label((name, options)), len(q), 12.5, 25.0, 1000.0, 990.0, 0.0125, 0.025)

    def chunk(name: str, q: Any, k: Any, v: Any, at: int, plain: Any, rounds: int, options: Any) -> prefill.ChunkRow:
        name = _label((name, options))
        return prefill.ChunkRow(name, len(q), at, 100.0, 100 / speed(name), speed(name))

    patch.setattr(vllm_build, "why_not", lambda: None)
    patch.setattr(prefill, "Plain", lambda *_: None)
    patch.setattr(prefill, "prompt_row", prompt)
    patch.setattr(prefill, "chunk_row", chunk)


def _prefill(within: Path, patch: pytest.MonkeyPatch) -> Words:
    _on_one_layer(patch)
    return ["prefill", "--formats", NINE, "--context", "64,256", "--head-size", "64"]


def _chunk(within: Path, patch: pytest.MonkeyPatch) -> Words:
    _on_one_layer(patch)
    return ["prefill", "--formats", NINE, "--context", "64,256", "--chunk", "32", "--head-size", "64"]


def _slow(within: Path, patch: pytest.MonkeyPatch) -> Words:
    def measure(context: int, rounds: int, head_size: int, wanted: slow.Wanted) -> list[Row]:
        names = ["bf16", *(slow.label(name, options) for name, options in wanted)]
        return [Row(n, 1.0 if n == "bf16" else len(n), 1.0, 64, 1.0, {"bf16": 64 / head_size}) for n in names]

    patch.setattr(slow, "measure", measure)
    patch.setattr(slow_command, "library", lambda: "there is one")
    patch.setattr(vllm_build, "why_not", lambda: None)
    return ["slow", "--context", "256"]


def _serve(within: Path, patch: pytest.MonkeyPatch) -> Words:
    def rows(formats: Sequence[tuple[str, Any]], model: Path, load: serve.Load, logs: Path) -> Iterator[serve.Row]:
        for name in map(_label, formats):
            for context, batch in load.shapes:
                plain = serve.Turn(0.4, context / 1e4)
                packed = serve.Turn(0.5, plain.step / speed(name))
                share = None if context == min(load.contexts) else 0.5
                yield serve.Row(name, serve.Cell(context, batch, plain, packed, speed(name), 0.8), share, 4.0)

    patch.setattr(serve, "rows", rows)
    return ["serve", str(folder(within)), "--formats", NINE, "--context", "64,256", "--batch", "1,4"]


def _capacity(within: Path, patch: pytest.MonkeyPatch) -> Words:
    def rows(formats: Sequence[tuple[str, Any]], model: Path, load: capacity.Load, logs: Path) -> Iterator[Found]:
        for name in ("bf16", *map(_label, formats)):
            yield Found(name, 1000, 2 * speed(name), 50 * speed(name), (0.25, 0.9), (0.02, 0.05), len(name), 0.5)

    patch.setattr(capacity, "rows", rows)
    return ["capacity", str(folder(within)), "--formats", NINE]


def _gpu(within: Path, patch: pytest.MonkeyPatch) -> Words:
    """Two shapes of three kernels; a third shape is left out, and a kernel refuses."""
    patch.setenv("TRITON_INTERPRET", "1")

    def steps(device: Any, formats: Any, shapes: Any, results: Results) -> None:
        results.take("copy", 0, 0, lambda: (1e-12, 1))
        results.note(REFUSED)
        for context in (64, 128):
            for n, name in enumerate(("sdpa", "flash_attn", "fp8", *formats)):
                results.take(name, 2, context, lambda n=n, context=context: (context * 1e-6 / (1 + n), 10**6))  # type: ignore[misc]

    def prompts(device: Any, formats: Any, tokens: int, results: Results) -> None:
        results.take("a layer's prefill", 1, 64, lambda: (2e-3, 0))
        for name in formats:
            results.take(f"packing {name}", 1, 64, lambda: (1e-3, 0))

    def chunk(device: Any, formats: Any, results: Results) -> None:
        results.take("chunk bf16 by PyTorch's SDPA", 1, 128, lambda: (1e-3, 0))
        results.take("chunk kitty2 by pages", 1, 128, lambda: (4e-3, 0))

    patch.setattr(table, "run", steps)
    patch.setattr(table, "run_prompts", prompts)
    patch.setattr(chunks, "run", chunk)
    return ["gpu", "--dry-run", "--formats", "kitty2,klt3"]


def _plot(within: Path, patch: pytest.MonkeyPatch) -> Words:
    return ["plot", str(H200)]


RUNS: dict[str, Callable[[Path, pytest.MonkeyPatch], Words]] = {
    "decode": _decode, "prefill": _prefill, "chunk": _chunk, "slow": _slow, "serve": _serve,
    "capacity": _capacity, "gpu": _gpu, "plot": _plot,
}  # fmt: skip


@dataclass
class Ran:
    """What a command did: its status, and what it put on its page."""

    out: Path
    words: Words
    status: int = -1
    drawn: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(name: str, within: Path, patch: pytest.MonkeyPatch, out: bool = True, *more: str) -> Ran:
    ran = Ran(within / "out", ["bench", *RUNS[name](within, patch), *more])
    if out:
        ran.words += ["--out", str(ran.out)]
    page = Report.page

    def spied(
        self: Report, drawn: Drawn, tables: Sequence[Table], notes: Sequence[str], *rest: Any, **named: Any
    ) -> Page:
        ran.drawn, ran.tables, ran.notes = [*(drawn or ())], [*tables], [*notes]
        return page(self, drawn, tables, notes, *rest, **named)

    patch.setattr(Report, "page", spied)
    ran.status = cli.main(ran.words)
    return ran
