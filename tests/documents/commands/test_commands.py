"""Every command of every document is walked through, or has a test, or a reason; and ours are read by their parsers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import documented
import pages
import parsing
import pytest
import shell
from documented import ACCOUNTS, PROSE
from test_walks import WALKS

ROOT = pages.ROOT
WALKED = {page for walk in WALKS.values() for page in walk.pages}
PAGES = documented.every_page()
OURS = "vllm-kvq|vllm serve|vllm run-batch|python -m vllm_kvq|python -m proof"
STAND_INS = {
    # the format that the page on adding one shows, which is not installed
    r"\bint4_hadamard(:hadamard_group=16)?\b": "polar4",
    # what the reader has, or a command writes
    r"\b(chats\.txt|code\.py|FILE)$": "README.md",
    r"results/kvq\.yaml": "configs/kitty2.yaml",
    r"^(NAME|FORMAT|F|\.\.\.)(?=$|,)": "polar4",
    r"^(TOKENS|N)$": "1024",
}
"""What is written -> what a parser takes in its place where it finds nothing of the reader's."""


def shown(page: str) -> list[pages.Command]:
    """What is for a shell. In docs/results a command is followed by an empty line and what it printed."""
    found = [c for c in pages.commands(page) if not c.block.startswith(PROSE.get(page, ()) or "\0")]
    return [c for c in found if not page.startswith("docs/results/") or c.text in c.block.partition("\n\n")[0]]


def runs(page: str, folder: Path) -> list[tuple[pages.Command, tuple[str, ...]]]:
    """Each program that the page's commands start, in their order, with its words."""
    commands = shown(page)
    return [(commands[run.at], run.words) for run in shell.runs(commands, folder)]


def unaccounted(page: str, folder: Path) -> list[str]:
    """Commands without an account, and accounts with the wrong number of commands."""
    starting = dict.fromkeys(command for command, _ in runs(page, folder))
    named = Counter(documented.account(page, command.text) for command in starting)
    wrong = [str(command) for command in starting if documented.account(page, command.text) is None]
    counted = {start: account.times for start, account in ACCOUNTS[page].items()}
    return wrong + [f"{start}: {n} times" for start, n in counted.items() if named[start] != n]


def misread(page: str, folder: Path) -> list[str]:
    """What parsers say of the page's commands, and of those in the middle of a sentence."""
    told = [(str(command), words) for command, words in runs(page, folder)]
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    for span in re.findall(rf"(?<!`)`((?:{OURS}) [^`\n]*--[^`\n]+)`(?!`)", text):
        (run,) = shell.runs([pages.Command(page, 0, span, span)], folder)
        told.append((f"{page}: {span}", run.words))
    found = []
    for where, words in dict.fromkeys(told):
        for old, new in STAND_INS.items():
            words = tuple(re.sub(old, new, word) for word in words)
        if (said := parsing.problem(words)) is not None:
            found.append(f"{where}: {said}")
    return found


def test_every_page_with_commands_is_walked_or_accounted_for() -> None:
    with_commands = {page for page in PAGES if shown(page)}
    assert with_commands >= WALKED | {*ACCOUNTS}
    assert with_commands - WALKED == {*ACCOUNTS}


@pytest.mark.parametrize("page", ACCOUNTS)
def test_every_command_has_a_test_or_a_reason(page: str, tmp_path: Path) -> None:
    assert unaccounted(page, tmp_path) == []


@pytest.mark.parametrize("page", ACCOUNTS)
def test_the_tests_exist_and_reasons_are_sentences(page: str) -> None:
    for account in ACCOUNTS[page].values():
        if account.test is not None:
            file, name = account.test
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), account.by
        else:
            assert len(account.by.split()) > 4
            assert all((ROOT / path).exists() for path in re.findall(r"[\w./]+/[\w.]*\w", account.by))


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_read_by_their_parsers(page: str, tmp_path: Path) -> None:
    assert misread(page, tmp_path) == []


@pytest.mark.parametrize("page", PROSE)
def test_prose_is_there(page: str) -> None:
    blocks = {command.block for command in pages.commands(page)}
    assert [start for start in PROSE[page] if not any(block.startswith(start) for block in blocks)] == []


@pytest.mark.parametrize("added", ["vllm-kvq doctor --patches", "vllm-kvq eval .weights/gemma-3-270m --quick"])
def test_a_new_command_is_noticed(added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that begins as others do."""
    page = "docs/quality.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / page).write_text(f"{text}\nOr:\n\n    {added}\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert len(unaccounted(page, tmp_path)) == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm-kvq eval MODEL --regime reading", "--regime"),
        ("    F=kity2\n    vllm-kvq bench attention --formats $F", "kity2"),
        ("vllm-kvq plan MODEL --gpu-memory 80G --tensors 2", "--tensors"),
        ("vllm-kvq check MODEL --kv-cache-dtyp kitty2", "--kv-cache-dtyp"),
        ("vllm-kvq evaluate MODEL", "there is no command 'evaluate'"),
        ("python -m proof residues --strides 13", "--strides"),
        ("python -m proof residue", "there is no command 'residue'"),
        ("cd x && VAR=1 vllm serve MODEL --kv-cache-dtype kity2 &", "kity2"),
        ("if true; then vllm serve MODEL --max-model-length 5; fi", "--max-model-length"),
        ("vllm run-batch -i in -o out --model MODEL --kv-cache-dtype kity2", "kity2"),
        (".venv/bin/python scripts/licences.py --everything", "--everything"),
        ("python examples/batch.py a b --model MODEL --token 3", "--token"),
        ("python scripts/gone.py", "there is no scripts/gone.py"),
        ("bash bench/gone.sh", "there is no bench/gone.sh"),
        ("make mutant", "the Makefile has no mutant"),
        ("make fuzz SEEDS=1", "the Makefile has no SEEDS=1"),
    ],
)
def test_what_is_misread_is_noticed(command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(f"# A page\n\n    {command.strip()}\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (found,) = misread("page.md", tmp_path)
    assert said in found


def test_what_is_misread_in_a_sentence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "As `vllm-kvq plan MODEL --context TOKENS` and `vllm-kvq plan M --contexts 5` say.\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (found,) = misread("page.md", tmp_path)
    assert "--contexts" in found
