"""report.html of `eval` and `bench`: it has all cells and plots, escapes what models say, and loads nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from made_up_benches import MODEL, REFUSED, RUNS, run

from proof.site.browser import DARK, DESKTOP, LIGHT, NONE, PHONE, Browser, chromium
from vllm_kvq import __version__, cli
from vllm_kvq.bench import figures
from vllm_kvq.bench.steps import Shape
from vllm_kvq.bench.timing import Row as Timed
from vllm_kvq.cli.bench import attention
from vllm_kvq.cli.eval import model as command
from vllm_kvq.cli.eval.page import NO_PLOTS, hurt_quotes
from vllm_kvq.cli.eval.page import page as eval_page
from vllm_kvq.cli.page.document import FILE, Page, Section
from vllm_kvq.cli.page.made import installed
from vllm_kvq.cli.page.tree import element, table
from vllm_kvq.console import Table
from vllm_kvq.drawing import Picture
from vllm_kvq.eval.results import plots, report
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED, Bin, Claim, Estimate, Hurt, Results, Row
from vllm_kvq.kernels.cpu.processor import processor_name

VOID = {"meta", "br", "link", "img", "input", "hr"}
EVIL = "</td><script>alert(1)</script>&amp;"
"""What a model may say."""


@dataclass
class Read(HTMLParser):
    """A page's elements, the text in each kind of them, and whether they are closed in the right order."""

    text: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(attributes) == len(dict(attributes)), f"an attribute of {tag} is there twice"
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} is closed where another element is open"

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def row(name: str, bits: float, kl: float, task: str = "text") -> Row:
    return Row(
        "a <model>", name, {}, task, TEACHER_FORCED, 1024, 4, bits,
        metrics={"kl": Estimate(kl, kl / 2, kl * 2), "accuracy": Estimate(1 - kl)},
        by_position={"kl": (Bin(0, 512, 9, Estimate(kl)), Bin(512, 1024, 9, Estimate(3 * kl)))},
        hurt=(Hurt("a\nb ", "cat", " sat", 77, 1.25, 0.01, 0.9), Hurt("x", EVIL, "z", 5, 0.5, 0.2, 0.4)),
    )  # fmt: skip


def results() -> Results:
    along = {name: (Bin(0, 64, 9, Estimate(kl)),) for name, kl in (("kl", 0.875), ("kl_forced", 0.625))}
    rows = [row("auto", 16.0, 0.0), row("squat2", 3.2, 0.2), row("kivi2", 3.3, 0.3), row("squat2", 3.2, 0.1, "recall")]
    rows.append(replace(row("kitty2", 3.0, 0.5), regime=DECODING, by_position=along))
    rows.append(Row("a <model>", "qjl3", {}, "text", TEACHER_FORCED, 1024, 0, None, problem=f"no, {EVIL}"))
    claim = Claim("squat2", "kivi2", TEACHER_FORCED, "text", 1024, "kl", 8, 0.5, 0.001, 0.05, 0.4, 0.6)
    return Results(tuple(rows), (claim,))


@dataclass(frozen=True)
class Written:
    path: Path
    drawn: list[Picture]
    tables: list[Table]

    @property
    def read(self) -> Read:
        return Read(self.path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder, found = tmp_path_factory.mktemp("eval"), results()
    drawn = plots.draw_all(found.rows, folder)
    path = eval_page(found, drawn, "vllm-kvq eval 'a <model>'", 5).write(folder)
    quoted = [quoting.table for quoting in hurt_quotes(found.rows, 5)]
    return Written(path, drawn, [*report.tables(found), *report.position_tables(found), *quoted])


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("bench")
    args = attention.parse(["--no-baseline", "--formats", "kitty2"])
    shapes = [Shape(context, 1, 32, 8, 128, 128) for context in (1024, 4096)]
    measured = [(s, [Timed("bf16", 2.0, 1.5, 64, 1.1), Timed("kitty2", s.context / 1e3, 0.5, 9, 1.2)]) for s in shapes]
    drawn = figures.plot(folder / "plot.png", measured, "32/8 heads")
    tables = [attention.table(args, shape, rows) for shape, rows in measured]
    return Written(attention.REPORT.page([drawn], tables, ["a note"], "vllm-kvq", ()).write(folder), [drawn], tables)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """What the other benchmarks write, by their names."""
    found = {}
    for name in RUNS:
        with pytest.MonkeyPatch.context() as patch:
            ran = run(name, tmp_path_factory.mktemp(name), patch)
        found[name] = Written(ran.out / FILE, ran.drawn, ran.tables)
    return found


@pytest.fixture(params=["evaluated", "benched", *RUNS])
def written(request: pytest.FixtureRequest) -> Written:
    if request.param in RUNS:
        of: dict[str, Written] = request.getfixturevalue("others")
        return of[request.param]
    found: Written = request.getfixturevalue(request.param)
    return found


# -- what is in it ----------------------------------------------------------------------------------------------------
def test_every_table_and_plot_is_in_it(written: Written) -> None:
    read = written.read
    cells = [[*table.head, *(cell for row in table.rows for cell in row)] for table in written.tables]
    shown = [*read.texts["th"], *read.texts["td"]]
    wanted = [cell.replace("\n", "") for of in cells for cell in of]  # an element separates a head's lines
    assert sorted(shown) == sorted(wanted)
    assert len(wanted) > 20
    assert [svg["aria-label"] for svg in read.all("svg")] == [picture.title for picture in written.drawn]
    assert len(read.texts["path"]) + len(read.all("path")) > 20


def test_what_is_not_a_table_is_in_it_too(evaluated: Written) -> None:
    read = evaluated.read
    text = " ".join(read.texts["body"][0].split())
    for said in ("qjl3: no, ", "95 % confidence interval", "adjusted for all comparisons", "vllm-kvq eval 'a <model>'"):
        assert said in text
    facts = dict(zip(read.texts["dt"], read.texts["dd"], strict=True))
    assert facts["model"] == "a <model>"
    assert facts["vllm_kvq"] == __version__
    assert processor_name() in facts["processor"]
    assert {"torch", "Python", "written"} <= {*facts}
    assert read.texts["b"] == ["better"]


def test_what_a_model_says_is_escaped(evaluated: Written) -> None:
    read = evaluated.read
    assert read.all("script") == []
    assert read.texts["mark"].count(EVIL) == read.texts["mark"].count("cat") == 5
    assert "<script" not in read.text
    assert "a\\nb " in read.text


def test_what_benchmarks_do_not_choose_is_escaped(others: dict[str, Written]) -> None:
    """The name of a model's folder, and what a kernel says when it refuses."""
    for name, said in (("decode", MODEL), ("serve", MODEL), ("gpu", REFUSED)):
        read = others[name].read
        assert read.all("script") == []
        assert "<script" not in read.text
        assert said in read.texts["body"][0]


def test_letters_that_no_file_may_have(tmp_path: Path) -> None:
    path = Page("t", "a lone \udc80", "c", (), [Section("s", ["x"])]).write(tmp_path)
    assert r"a lone \udc80" in path.read_text(encoding="utf-8")


# -- what a page must be ----------------------------------------------------------------------------------------------
def test_it_loads_nothing(written: Written) -> None:
    read = written.read
    for tag, attributes in read.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
        assert not [value for value in attributes.values() if "//" in (value or "")], tag
    assert "http:" not in read.text
    assert "https:" not in read.text
    assert "@import" not in read.text
    assert {address[0] for address in re.findall(r"url\(([^)]*)\)", read.text)} <= {"#"}
    (policy,) = (meta["content"] for meta in read.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "script-src" not in policy


def test_it_is_valid(written: Written) -> None:
    read = written.read
    assert read.text.startswith("<!doctype html>\n<html lang=")
    assert read.open == []
    names = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(names) == len({*names})
    links = [attributes["href"] or "" for tag, attributes in read.tags if "href" in attributes]
    assert {link[1:] for link in links} <= {*names}
    assert {link[1:] for link in re.findall(r"url\((#[^)]*)\)", read.text)} <= {*names}
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


def test_the_contents_name_every_section(evaluated: Written) -> None:
    """And what is in a section, if that is more than one thing."""
    read = evaluated.read
    linked = [a["href"] for a in read.all("a")]
    headings = [f"#{h['id']}" for h in (*read.all("h2"), *read.all("h3"))]
    alone = {f"#s{n}-1" for n in range(1, 9) if f"#s{n}-2" not in headings}
    assert sorted({*headings} - {"#made"} - alone) == sorted(map(str, linked))
    assert len(linked) > 10


def test_numbers_are_aligned_from_the_tables_own_column_on() -> None:
    made = table(Table(["format", "KL along", "0 to 64"], [["kitty2", "its own text", "0.5"]], right=2))
    kinds = [(cell.tag, cell.text, cell.get("class")) for cell in made.iter() if cell.tag in ("th", "td")]
    assert [kind for _, _, kind in kinds] == [None, None, "number"] * 2
    assert kinds[-1] == ("td", "0.5", "number")


def test_a_package_may_have_another_name() -> None:
    """vLLM for CPUs, for example."""
    assert installed(("no-such-package", "torch")) == version("torch")
    assert installed(("no-such-package",)) is None


def test_text_is_text() -> None:
    made = element("p", {}, "a", element("b", {}, "c"), "d", "e")
    assert (made.text, made[0].text, made[0].tail) == ("a", "c", "de")


# -- the commands -----------------------------------------------------------------------------------------------------
def test_eval_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "evaluate", lambda args, chosen: results())
    monkeypatch.setattr(command, "check_model", lambda *_: None)
    monkeypatch.setattr(plots, "draw_all", lambda rows, folder: [])
    assert cli.main(["eval", "a <model>", "--formats", "squat2", "--out", str(tmp_path)]) == 0
    read = Read((tmp_path / FILE).read_text())
    assert read.texts["code"] == [f"vllm-kvq eval 'a <model>' --formats squat2 --out {tmp_path}"]
    assert EVIL in read.texts["mark"]


def test_without_matplotlib_it_has_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "evaluate", lambda args, chosen: results())
    monkeypatch.setattr(command, "check_model", lambda *_: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["eval", "a <model>", "--formats", "squat2", "--out", str(tmp_path)]) == 0
    read = Read((tmp_path / FILE).read_text())
    assert NO_PLOTS in read.texts["p"]
    assert len(read.all("table")) > 3


def test_show_says_whose_versions_it_has(tmp_path: Path) -> None:
    results().save(tmp_path / "results.json")
    assert cli.main(["eval", "show", str(tmp_path / "results.json"), "--hurt", "1", "--out", str(tmp_path)]) == 0
    read = Read((tmp_path / FILE).read_text())
    assert any("perhaps not those that measured" in text for text in read.texts["dd"])
    assert {*read.texts["mark"]} == {"cat"}


# -- in a browser -----------------------------------------------------------------------------------------------------
SIZES = "[...document.querySelectorAll('svg')].map(x => x.getBoundingClientRect()).map(x => [x.width, x.height])"
WIDTHS = "[document.documentElement.scrollWidth, window.innerWidth]"
GROUND = "getComputedStyle(document.body).backgroundColor"
LETTERS = "getComputedStyle(document.querySelector('svg text')).fill"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip(NONE)
    with Browser() as found:
        yield found


def test_a_browser_shows_it(browser: Browser, written: Written) -> None:
    colours = set()
    for scheme in (LIGHT, DARK):
        for width in (DESKTOP, PHONE):
            browser.show(written.path.as_uri(), width, scheme)
            assert browser.value("document.title") == written.read.texts["title"][0]
            assert browser.complaints == []
            sizes = browser.value(SIZES)
            assert len(sizes) == len(written.drawn)
            assert all(wide > 300 and high > 150 for wide, high in sizes)
            scrolled, shown = browser.value(WIDTHS)
            assert scrolled <= shown == width
        colours.add((browser.value(GROUND), browser.value(LETTERS)))
    (light, ink), (dark, chalk) = sorted(colours, reverse=True)
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600 > sum(map(int, re.findall(r"\d+", ink)[:3]))
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 150 < sum(map(int, re.findall(r"\d+", chalk)[:3]))


def test_the_browser_notices_what_is_wrong(browser: Browser, tmp_path: Path, evaluated: Written) -> None:
    """The control: a script, a picture from elsewhere, a table that makes the page too wide."""
    text = evaluated.path.read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.html"
    for planted in ("<script>document.title = 'mine'</script>", '<img src="https://localhost:1/x.png">'):
        wrong.write_text(text.replace("<footer>", f"{planted}<footer>"))
        browser.show(wrong.as_uri())
        assert browser.complaints
        assert "Content Security Policy" in browser.complaints[0]
        assert browser.value("document.title") == "vllm-kvq eval: a <model>"
    wrong.write_text(text.replace("<footer>", '<div style="width: 2000px">x</div><footer>'))
    browser.show(wrong.as_uri())
    scrolled, shown = browser.value(WIDTHS)
    assert scrolled > shown
