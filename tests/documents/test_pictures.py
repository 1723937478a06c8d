"""The documents' pictures show the recorded results and the formats as they are now."""

from __future__ import annotations

import html
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pages
import pytest

from proof.pictures.canvas import fingerprint
from proof.pictures.explained import hit, page
from proof.pictures.explained.page import bound
from proof.pictures.kl import measured, quality
from proof.pictures.main import FOLDER, PICTURES, RECORDING, file_name, main
from proof.pictures.speeds import bars, capacity, gpu, in_flight, speed
from vllm_kvq import console
from vllm_kvq.cli.bench import capacity as capacity_command
from vllm_kvq.cli.check.every import HEAD, notes, ranked
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import FORMATS, suite
from vllm_kvq.integration.advice import losses, speeds
from vllm_kvq.kernels.slots import HEADER_BYTES, SlotGeometry

ROOT = Path(__file__).parents[2]


def described(svg: str) -> str | None:
    found = re.search(r"<dc:description>(\w+)</dc:description>", svg)
    return found and found[1]


@pytest.mark.parametrize("module", PICTURES, ids=file_name)
def test_is_up_to_date(module: ModuleType) -> None:
    drawn = (FOLDER / file_name(module)).read_text()
    assert described(drawn) == fingerprint(module.data()), "run python -m proof pictures"


def test_a_result_that_has_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in measured.RESULTS.glob("real-*-4096.csv"):
        (tmp_path / path.name).write_text(path.read_text().replace(",polar4,", ",polar3,"))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert described((FOLDER / file_name(quality)).read_text()) != fingerprint(quality.data())


def test_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture names what it shows, and the same data gives the same bytes."""
    monkeypatch.setattr("proof.pictures.main.be_quiet", lambda: None)
    for folder in ("first", "second"):
        assert main(["--out", str(tmp_path / folder)]) == 0
    for module in PICTURES:
        first, second = ((tmp_path / folder / file_name(module)).read_bytes() for folder in ("first", "second"))
        assert first == second
    words = shown(tmp_path / "first" / "quality.svg")
    assert {"kitty2", "fp8", "nats per token"} <= {*words}


def shown(path: Path) -> list[str]:
    """The words of a picture, whose letters stay letters."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


def recorded_lines() -> list[str]:
    """What `check` printed, as the picture has it."""
    lines: dict[float, str] = {}
    drawn = (FOLDER / RECORDING).read_text(encoding="utf-8")
    for y, text in re.findall(r'<text [^>]* y="([\d.]+)" textLength[^>]*>([^<]+)</text>', drawn):
        lines[float(y)] = lines.get(float(y), "") + html.unescape(text).replace("\xa0", " ").rstrip("\n")
    return [line for _, line in sorted(lines.items())]


def test_the_recording_shows_check_as_it_is() -> None:
    """Its rows in their order, the measured losses and speeds, and the notes. If not: pictures --check MODEL."""
    lines = recorded_lines()
    start = next(number for number, line in enumerate(lines) if line.startswith(HEAD[0]))
    assert lines[start].split() == " ".join(HEAD).split()
    rows = [line.split() for line in itertools.takewhile(str.strip, lines[start + 1 :])]
    recommended = BUDGETS[RECOMMENDED].formats[0]
    assert rows[0][0] == recommended
    assert [row[0] for row in rows] == sorted(ranked(), key=lambda name: name != recommended)

    said = " ".join(" ".join(lines[start + 1 + len(rows) :]).split())
    (loss,) = (found for found in losses.measured() if found.where in said)
    (speed,) = (found for found in speeds.measured() if found.where in said)
    for name, *_, kl, times, kernels in (row[:7] for row in rows):
        slow = kernels.endswith(",")
        assert kl == (console.short(loss.kl[name]) if name in loss.kl else "-"), name
        assert times == (f"{speed.times_bf16[name]:.1f}" if name in speed.times_bf16 and not slow else "-"), name
    shown = {"loss": {"where": loss.where}, "speed": {"where": speed.where}, "warnings": [], "fewer_tokens": None}
    for note in (*notes([shown]), f"--kv-cache-dtype {RECOMMENDED}", "switch on", "go back"):
        assert note in said


def test_the_recording_loads_nothing_from_the_network() -> None:
    assert "url(" not in (FOLDER / RECORDING).read_text().replace("url(#", "")


def test_each_picture_is_in_a_document() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(path.read_text() for path in documents)
    for path in FOLDER.iterdir():
        assert f"pictures/{path.name})" in text, path.name


def test_each_picture_is_one_that_is_drawn_from_what_is_recorded() -> None:
    """No other one lies among the documents: nobody would notice that it is out of date."""
    known = {FOLDER / name for name in (RECORDING, *map(file_name, PICTURES))}
    there = {path for ending in ("png", "svg", "jpg") for path in (ROOT / "docs").rglob(f"*.{ending}")}
    of_a_gpu = {*(ROOT / "docs" / "results").glob("gpu-*.png")}  # bench/gpu.sh leaves it there, and git ignores it
    assert there - of_a_gpu == known


# -- quality against bits ---------------------------------------------------------------------------------------------
def test_formats_that_were_measured_later_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of their own. Those of budgets get a name in each panel, and no panel has more than six."""
    before = {row.label for row in measured.rows("real-qwen2.5-1.5b-4096", quality.METRIC)}
    new = sorted({name for budget in BUDGETS.values() for name in budget.formats} - before)
    assert new
    for path in measured.RESULTS.glob("real-*-4096.csv"):
        head, *lines = path.read_text().splitlines()
        like = next(line for line in lines if ",polar4," in line)
        more = [like, *(like.replace(",polar4,", f",{name},") for name in new)]
        (tmp_path / path.name).write_text(path.read_text())
        (tmp_path / f"{path.stem}-more.csv").write_text("\n".join([head, *more]) + "\n")
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    quality.draw(tmp_path / "quality.svg")
    words = shown(tmp_path / "quality.svg")
    named = [word for word in words if word in FORMATS or word == "fp8"]
    panels, left = len(quality.MODELS), len(before) + len(new) - 6
    assert left > 0
    assert all(named.count(name) == panels for name in new)
    assert len(named) == 6 * panels
    assert words.count(f"grey: {left} more") == panels
    drawn = shown(FOLDER / "quality.svg")
    assert {*new} <= {*drawn}
    assert [drawn.count(name) for name in ("fp8", *FORMATS) if name in drawn] == 6 * [panels]


@pytest.mark.parametrize("name", ["quality", "given", "generated"])
def test_quality_has_units(name: str) -> None:
    words = shown(FOLDER / f"{name}.svg")
    assert "nats per token" in words
    assert "bits per number, everything counted" in words


def test_axes_of_the_transform_say_what_they_show() -> None:
    words = shown(FOLDER / "transform.svg")
    assert {"share of variance", "squared error, share of variance", "relative error, bits by variance"} <= {*words}


# -- capacity and speed -----------------------------------------------------------------------------------------------
def test_capacity_has_the_formats_of_budgets() -> None:
    found = capacity.formats()
    assert {name for budget in BUDGETS.values() for name in budget.formats} <= {*found}
    assert len(found) == len({*found}) <= 6
    assert {*found, "fp8", "bf16"} <= {*shown(FOLDER / "capacity.svg")}


def test_requests_in_flight_name_the_processor_and_every_cache() -> None:
    words = shown(FOLDER / "in_flight.svg")
    assert {in_flight.WHERE, "requests in flight", "output tokens per second", *in_flight.LOADS.values()} <= {*words}
    for found in in_flight.data().values():
        assert 2 <= len(found) <= 8
        assert {*found} <= {*words}


def test_the_loads_in_a_picture_are_those_of_the_documents_commands() -> None:
    page = "docs/benchmarks.md"
    assert in_flight.WHERE in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    start = "vllm-kvq bench capacity "
    commands = [command.text.replace("\\\n", "") for command in pages.commands(page) if command.text.startswith(start)]
    loads = [capacity_command.parser().parse_args(shlex.split(text.removeprefix(start))) for text in commands]
    assert [*in_flight.LOADS.values()] == [
        f"{a.requests} requests of {a.context} + {a.tokens} tokens, {a.cache_bytes >> 20} MiB of cache" for a in loads
    ]


def test_bars_name_the_processor_and_every_format() -> None:
    for module, titles in (
        (speed, [f"{processor}, two threads" for processor in speed.PROCESSORS.values()]),
        (gpu, [f"{gpu.DEVICE}, {about}" for about in gpu.BATCHES.values()]),
    ):
        words = shown(FOLDER / file_name(module))
        assert {*titles} <= {*words}
        found = [name for panel in module.data().values() for name in panel]
        assert found
        assert sorted(word for word in words if word in FORMATS) == sorted(found)
        assert bars.LIMIT in words
    klt = {name for name in suite("public") if name.startswith("klt")}
    assert klt <= {*speed.data()["cpu-attention-cascadelake.csv"]} & {*gpu.data()[64]}


def test_times_on_a_gpu_are_against_the_fastest_of_bf16() -> None:
    """As the page that `bench/gpu.sh` wrote has them."""
    page = (ROOT / "docs" / "results" / "gpu-nvidia-h200.md").read_text()
    for batch, found in gpu.data().items():
        for name, at in found.items():
            for context, (times, _) in at.items():
                (row,) = re.findall(rf"^ +{name} +{batch} +{context} .*", page, re.M)
                assert row.split()[7] == f"{times:.2f}"


# -- a page and what is not in it -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [page.FORMAT, page.WITH_STATE])
def test_the_sidecar_is_that_of_the_kernels(name: str) -> None:
    """Blocks of a page's size, with as many slots of each kind as the layout has."""
    fmt = bound(name)
    at = SlotGeometry.of(fmt, 1, 0)
    blocks = page.companion_blocks(fmt)
    assert len(blocks) == at.sidecar_blocks + at.sink_blocks
    assert {sum(size for _, size, _ in block) for block in blocks} == {fmt.record_bytes}
    sizes: dict[str, float] = {}
    for part, size, kind in (part for block in blocks for part in block):
        sizes[kind] = sizes.get(kind, 0) + size
        if kind == "16 bits":
            assert size == at.slot_bytes * int(re.findall(r"\d+", part)[0])
    assert sizes["header"] == HEADER_BYTES == 12
    assert sizes.get("state", 0) == at.state_slots * at.slot_bytes >= at.state_bytes
    assert sizes["16 bits"] == (fmt.W + fmt.unit + fmt.S) * at.slot_bytes


def test_one_format_has_a_state_and_the_other_has_none() -> None:
    assert bound(page.FORMAT).state_rows == 0 < bound(page.WITH_STATE).state_rows
    assert bound(page.FORMAT).record_bytes == bound(page.WITH_STATE).record_bytes


BOX = r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) \2 \nL \3 ([\d.]+) \nL \1 \4 \nz\n" clip-path'


def test_a_page_is_drawn_to_scale() -> None:
    """The boxes of each row are as wide as their parts are large; blocks are equally wide in both rows of blocks."""
    svg, rows = (FOLDER / "page.svg").read_text(), [parts for _, parts in page.data()]
    widths = [float(right) - float(left) for left, _, right, _ in re.findall(BOX, svg)]
    scales = []
    for parts in rows:
        sizes = [size for _, size, kind in parts if kind != page.GAP]
        drawn, widths = widths[: len(sizes)], widths[len(sizes) :]
        scales.append(sum(drawn) / sum(sizes))
        assert drawn == pytest.approx([size * scales[-1] for size in sizes], rel=1e-3)
    assert widths == []
    assert scales[page.IN_BLOCKS] == pytest.approx(scales[-1], rel=1e-3)
    assert {"header", "subspace", f"{bound().S} sinks", "free"} <= {*shown(FOLDER / "page.svg")}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], []),
        ([("header", 0.01), ("sinks", 0.9)], [0, 0]),
        ([("header", 0.01), ("subspace", 0.04)], [1, 0]),
        ([("v_scale", 0.97), ("v_zero", 0.99)], [0, 1]),
    ],
)
def test_names_below_boxes_cross_nothing(names: list[tuple[str, float]], found: list[int]) -> None:
    assert page.lines(names) == found


def test_the_hit_is_what_the_engine_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's manager finds whole blocks up to the limit that ours gives it."""
    from vllm_kvq.integration.core import manager

    fmt, found = bound(), []
    monkeypatch.setattr(
        manager.FullAttentionManager, "find_longest_cache_hit", lambda hashes, limit, *_: found.append(limit)
    )
    spec, pool = SimpleNamespace(recomputed=fmt.W), SimpleNamespace(hash_block_size=fmt.N)
    for tokens in range(fmt.N, 5 * fmt.N):
        manager.PackedManager.find_longest_cache_hit([0] * (tokens // fmt.N), tokens - 1, [0], pool, spec)
        assert hit.hit(fmt, tokens, tokens) == found[-1] // fmt.N * fmt.N
