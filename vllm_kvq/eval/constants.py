"""Where calibrated formats get their constants in an evaluation: those that can be served, from a server of the
model (integration/preview/constants.py). Others' are fitted to these texts, none of which an evaluation measures:

    documentation  paragraphs of Python's, from `tasks.filler`
    code           modules of transformers
    chats          functions of other such modules as answers, in the model's own chat template

`texts.py` uses none of them. Constants need variety: `python -m proof transforms` shows how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.tasks.tasks import filler
from vllm_kvq.eval.tasks.texts import Piece, asked_for, can_chat, tokens_of
from vllm_kvq.formats import get_format
from vllm_kvq.formats.by_layer import options_at
from vllm_kvq.integration.preview.constants import Known

TEXTS = 9
TOKENS = 2048
"""The most that are taken from a text; fewer if the model has no room for as many."""
CHARACTERS = 10
"""A token has fewer on average."""
LONGEST = 40_000
"""Characters of a module; longer ones would be most of what is read."""


def of_texts(choice: Choice) -> bool:
    """Whether its constants are fitted to the texts."""
    return _calibrated(choice, served=False)


def of_server(choice: Choice) -> bool:
    """Whether it has a server's constants."""
    return _calibrated(choice, served=True)


def named(choice: Choice, servers: Known) -> dict[str, str]:
    """What the name of a stored measurement says of a server's constants; if no server starts, its row says why."""
    if not of_server(choice):
        return {}
    try:
        return {"constants": servers.digest(choice.format, choice.options)}
    except ValueError:
        return {"constants": "none"}


def _calibrated(choice: Choice, served: bool) -> bool:
    if not choice.ours:
        return False
    settings = get_format(choice.format).settings(options_at(choice.options, None))
    codecs = (settings.keys, settings.values)
    return any(c.calibrated for c in codecs) and served == all(c.reference_only is None for c in codecs)


def calibration_texts(tokenizer: Any, longest: int) -> tuple[tuple[int, ...], ...]:
    """The kinds take turns."""
    length = min(TOKENS, longest - 1)
    modules = _modules()
    streams = {"documentation": _documentation(), "code": _code(modules[::2])}
    if can_chat(tokenizer):
        streams["chats"] = _chats(modules[1::2])
    kinds = [*streams]
    return tuple(_text(tokenizer, kind, streams[kind], length) for kind in (kinds * TEXTS)[:TEXTS])


def _text(tokenizer: Any, kind: str, stream: Iterator[Piece], length: int) -> tuple[int, ...]:
    taken: list[Piece] = []
    while sum(len(piece.text) + len(piece.answer) for piece in taken) < CHARACTERS * length:
        taken.append(next(stream))
    return tokens_of(tokenizer, kind, taken)[:length]


def _documentation() -> Iterator[Piece]:
    rng = Random("calibration")
    while True:
        yield Piece("pydoc_data", filler(rng, 2000))


def _code(modules: Sequence[tuple[str, str]]) -> Iterator[Piece]:
    return (Piece(name, source) for name, source in modules)


def _chats(modules: Sequence[tuple[str, str]]) -> Iterator[Piece]:
    return (piece for name, source in modules for piece in asked_for(name, source))


def _modules() -> list[tuple[str, str]]:
    import transformers

    root = Path(transformers.__file__).parent
    paths = sorted(root.rglob("*.py"))
    Random("calibration").shuffle(paths)
    read = ((str(path.relative_to(root)), path.read_text("utf-8")) for path in paths)
    return [(name, source) for name, source in read if 2000 < len(source) < LONGEST]
