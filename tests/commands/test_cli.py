"""The command line: help, exit codes and JSON of every command, and the table of `vllm-kvq formats`."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from vllm_kvq import __version__, cli, console
from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.formats.table import declared_options, public_formats

HEADS, BLOCKS = (64, 96, 128), (64, 160)


def rows(text: str) -> tuple[list[tuple[int, int]], dict[str, list[tuple[float, float]]]]:
    """The columns' (head size, block size), and each format's (bits, factor) in them."""
    head, names, *lines = text.split("\n\n")[0].splitlines()
    columns = [(int(d), int(n)) for d, n in re.findall(r"d=(\d+) N=(\d+)", head)]
    assert names.split() == ["bits", "factor"] * len(columns)
    found = {}
    for line in lines:
        cells = re.findall(r"(\d+\.\d{4})\s+(\d+\.\d{2})x", line)
        assert len(cells) == len(columns)
        found[line.split()[0]] = [(float(bits), float(factor)) for bits, factor in cells]
    return columns, found


def test_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["formats", "--head-size", ",".join(map(str, HEADS)), "--block-size", ",".join(map(str, BLOCKS))]) == 0
    )
    columns, found = rows(capsys.readouterr().out)
    assert columns == [(d, n) for d in HEADS for n in BLOCKS]
    assert list(found) == [fmt.name for fmt in public_formats()]
    for name, cells in found.items():
        for (d, n), (bits, factor) in zip(columns, cells, strict=True):
            assert bits == round(FORMATS[name].bits_per_element(d, n), 4)
            assert factor == round(FORMATS[name].capacity_factor(d, n), 2)
            # one follows from the other
            assert factor == pytest.approx(16 / bits, abs=0.01)


def test_the_columns_differ() -> None:
    """The control: numbers of another column would be noticed."""
    squat = FORMATS["squat2"]
    assert len({round(squat.bits_per_element(d, n), 4) for d in HEADS for n in BLOCKS}) == len(HEADS) * len(BLOCKS)


def test_titles_stand_next_to_their_formats(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["formats"])
    lines = capsys.readouterr().out.splitlines()
    for fmt in public_formats():
        assert any(line.startswith(f"{fmt.name} ") and line.endswith(f"  {fmt.title}") for line in lines)


def test_a_head_size_that_no_format_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["formats", "--head-size", "72"])
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert "error: argument --head-size: no format has heads of 72 channels; there are 64, 80, 96" in said


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--head-size", ",".join(map(str, HEADS)), "--block-size", ",".join(map(str, BLOCKS))]
    assert cli.main(["formats", "--json", *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(public_formats()) * len(HEADS) * len(BLOCKS)
    for row in found:
        fmt, d, n = FORMATS[row["format"]], row["head_size"], row["block_size"]
        bound = fmt.bind(Geometry(d, n))
        assert (row["bits"], row["factor"]) == (fmt.bits_per_element(d, n), fmt.capacity_factor(d, n))
        assert (row["W"], row["S"]) == (bound.W, bound.S)
    assert cli.main(["formats", "--options", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [o["name"] for o in document["options"]] == [o.name for o, _ in declared_options()]
    assert {c["half"] for c in document["codecs"]} == {"keys", "values"}


# -- every command ----------------------------------------------------------------------------------------------------
COMMANDS = {" ".join(command.words): command for command in cli.COMMANDS}
GROUPS = {" ".join(group.words): group for group in cli.GROUPS}


def parser_of(name: str) -> ArgumentParser:
    return importlib.import_module(COMMANDS[name].module).parser()  # type: ignore[no-any-return]


def helped(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What --help prints, on standard output, with status 0."""
    try:
        status = cli.main([*words, "--help"])
    except SystemExit as exited:
        status = int(exited.code or 0)
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


@pytest.mark.parametrize("name", [*GROUPS, *COMMANDS])
def test_help_has_examples_and_exit_codes(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text_of_the_user in ("chats.txt", "code.py"):
        Path(text_of_the_user).write_text("What users bring.\n", encoding="utf-8")
    text = helped(name.split(), capsys)
    assert text.startswith(f"usage: {f'vllm-kvq {name}'.strip()} ")
    codes = text[text.index("exit codes:\n") :]
    assert re.fullmatch(r"exit codes:\n  0  done\n  1  \S.*\n  2  wrong usage\n", codes)
    examples = text[text.index("examples:\n") : text.index("exit codes:")].splitlines()[1:-1]
    assert examples
    for example in "\n".join(examples).replace("\\\n", "").splitlines():
        words = shlex.split(example)
        assert words[0] == "vllm-kvq"
        command = next(n for n in COMMANDS if words[1 : 1 + len(n.split())] == n.split())
        parser_of(command).parse_args(words[1 + len(command.split()) :])  # SystemExit if it is wrong


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_lists_its_commands_and_alone_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = helped(name.split(), capsys)
    for command in COMMANDS.values():
        if " ".join(command.words).startswith(name):
            assert f"{' '.join(command.words[len(name.split()) :])}  " in listed
            assert command.about in listed
    assert cli.main(name.split()) == 2
    alone = capsys.readouterr()
    assert (alone.out, alone.err) == ("", listed)
    assert cli.main([*name.split(), "nonsense"]) == 2
    unknown = capsys.readouterr()
    assert unknown.out == ""
    words = f"vllm-kvq {name}".strip()
    assert unknown.err == f"{words}: error: there is no command 'nonsense'; {words} --help lists them\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_json_and_names_no_test_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(name.split(), capsys)
    assert "--json" in text
    hidden = [fmt.name for fmt in FORMATS.values() if not fmt.public]
    assert hidden
    assert [word for word in hidden if word in text] == []
    offered = [str(c) for action in parser_of(name)._actions for c in action.choices or ()]
    assert [word for word in hidden if word in offered] == []


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--options"], ["--options", "--json"]])
def test_formats_lists_no_test_format(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats", *arguments]) == 0
    assert "lossless" not in capsys.readouterr().out
    assert "lossless" in FORMATS


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        if name == "check":  # vLLM's parser, in tests/planning/preview/test_check.py
            continue
        with pytest.raises(SystemExit) as exited:
            cli.main([*name.split(), "--no-such-flag"])
        assert exited.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.splitlines()[-1].startswith(f"vllm-kvq {name}: error: ")


def test_a_command_imports_nothing_of_the_others() -> None:
    code = (
        "import sys; from vllm_kvq.cli import main; main(['formats']); main(['bench']); "
        "print(*sorted(m for m in sys.modules if m.startswith(('vllm_kvq.', 'vllm.')) or m in ('vllm', 'rich')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = loaded.splitlines()[-1].split()
    assert "vllm_kvq.cli.formats" in names
    others = [n for n in names if n.startswith(("vllm_kvq.bench", "vllm_kvq.eval", "vllm_kvq.integration"))]
    peers = [n for n in others if n.startswith("vllm_kvq.eval.peers")]  # formats, and the command lists all of them
    assert others == ["vllm_kvq.eval", *peers]
    assert not {"vllm", "rich", "vllm_kvq.cli.check.one", "vllm_kvq.cli.doctor"} & {*names}


@pytest.mark.parametrize("name", [*GROUPS, *COMMANDS])
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(name.split(), capsys)
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", ["formats", "formats --options"])
def test_tables_fit_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and numbers are not folded."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(command.split()) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    whole = [o.name for o, _ in declared_options()] if "--options" in command else [f.name for f in public_formats()]
    assert {*whole} <= {*text.split()}
    if command == "formats":
        assert len(re.findall(r"\d\.\d{4} \d\.\d\dx", text)) == 4 * len(whole)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "-V"):
        assert cli.main([flag]) == 0
        assert capsys.readouterr().out == f"vllm-kvq {__version__}\n"


def test_help_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "bench", "eval heads"):
        said = helped(name.split(), capsys)
        with contextlib.suppress(SystemExit):
            assert cli.main(["help", *name.split()]) == 0
        assert capsys.readouterr().out == said


SLOW = ("calibrate", "bench ", "eval")
QUICK = ("bench plot", "eval show")


@pytest.mark.parametrize("name", [n for n in COMMANDS if n.startswith(SLOW) and n not in QUICK])
def test_commands_that_take_minutes_say_so(name: str) -> None:
    assert "Takes minutes" in str(parser_of(name).description)


def test_the_options_have_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats", "--options"]) == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.split("\n\n")[1].splitlines()]
    assert lines[0] == ["option", "meaning", "default", "read by", "values"]
    found = {line[0]: line[2] for line in lines[1:]}
    assert found["r"] == "5"
    assert found["S"] == "4 or 32"
    assert found["keys"] == "by format"
    assert found["recompute"] == "unset"
    assert {*found} == {option.name for option, _ in declared_options()}


REFUSED = [
    ("formats --head-size 7", 2, "argument --head-size: no format has heads of 7 channels", "there are 64, 80"),
    ("eval M --task recall", 2, "unknown argument --task", "did you mean --tasks?"),
    ("eval M --tasks recal", 2, "argument --tasks: there is no 'recal'", "did you mean recall?"),
    ("bench atention", 2, "there is no command 'atention'", "did you mean vllm-kvq bench attention?"),
    ("check M --kv-cache-dtype squat3", 2, "--kv-cache-dtype: there is no format 'squat3'", "did you mean squat4?"),
    ("eval show nothing.json", 2, "there is no file nothing.json", "name a results.json of "),
    ("eval show pyproject.toml", 1, "pyproject.toml can't be read as results of `vllm-kvq eval`: ", None),
]


@pytest.mark.parametrize(("command", "status", "error", "instead"), REFUSED, ids=[c for c, *_ in REFUSED])
def test_a_refusal_as_json(
    command: str, status: int, error: str, instead: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same status and the same words as the refusal in a sentence."""

    def run(words: list[str]) -> int:
        try:
            return cli.main(words)
        except SystemExit as exited:
            return int(exited.code or 0)

    assert run([*command.split(), "--json"]) == status
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert said.err == ""
    assert {*document} == {"error", "instead"}
    assert document["error"].startswith(error)
    assert document["instead"] == instead or document["instead"].startswith(instead)
    assert run(command.split()) == status
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.endswith("; ".join(filter(None, (document["error"], document["instead"]))))


# -- tables -----------------------------------------------------------------------------------------------------------
TABLE = console.Table(("name\n", "size\nMB"), [("[a]", "1.5"), ("longer", "20")])


def test_a_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.show()
    assert capsys.readouterr().out == "name    size\n          MB\n[a]      1.5\nlonger    20\n"


def test_a_table_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    TABLE.show()
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "─" in printed
    # text as it is, not read as rich's markup
    assert "[a]" in printed
    assert {"name", "size", "longer", "1.5", "20"} <= {*re.findall(r"[\w.]+", printed)}


TABLES = [
    "formats",
    "formats --options",
    "conformance --formats kitty2 --head-size 64",
    "plan MODEL --cache-bytes 64G --concurrency 4 --context 256 --formats kitty2,polar4_v16",
]


@pytest.mark.parametrize("command", TABLES)
def test_words_and_numbers_are_whole_on_80_columns(
    command: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[console.Table] = []
    show = console.Table.show
    monkeypatch.setattr(console.Table, "show", lambda table: tables.append(table))
    assert cli.main(command.replace("MODEL", str(model)).split()) == 0
    assert tables
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for table in tables:
        show(table)
        text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        assert [line for line in text.splitlines() if len(line) > 80] == []
        cells = [cell for line in (table.head, *table.rows) for cell in line]
        assert {word for cell in cells for word in cell.split()} <= {*text.split()}


def test_a_table_that_no_terminal_has_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    numbers = [f"{10**i:,}" for i in range(6, 10)]
    console.Table(["name", *"abcd", ""], [["a name", *numbers, "some words"]]).show()
    assert {*numbers, "a", "name", "some", "words"} <= {*re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).split()}
    assert console.Table(("a", "b"), [("x", "two words")], 2).widths(7) == [1, 5]


@pytest.mark.parametrize("command", ["formats", "formats --help", "formats --options"])
def test_a_reader_that_has_seen_enough(command: str) -> None:
    """As `| head -1` is, which closes the pipe."""
    started = [sys.executable, "-m", "vllm_kvq", *command.split()]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_another_broken_pipe_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "run", broken)
    monkeypatch.setattr(cli, "_unread", lambda: False)
    with pytest.raises(BrokenPipeError):
        cli.main(["formats"])


def test_rows_fit_their_head() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        console.Table(("a", "b"), [("only one",)])
