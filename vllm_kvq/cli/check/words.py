"""Arguments of `vllm-kvq check` that can't be meant, found in the words themselves: vLLM takes seconds to load."""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvq.cli.arguments import size_for_vllm
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.table import DEFAULT_N, FORMATS, VLLM_DTYPES, public_formats
from vllm_kvq.integration.plan.memory import SPACE
from vllm_kvq.integration.plan.options import misspelled
from vllm_kvq.integration.preview.hub import name_problem

OURS = ("--kv-cache-dtype", "--additional-config", "--max-model-len", "--block-size", "--kv-cache-memory-bytes")
"""Flags that take one word, and are often given."""


def words_problem(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """A sentence that names the argument and the way out."""
    checks = (
        _config(words),
        _dtype(words),
        _options(words),
        _memory(words, environment),
        _block_size(words),
        _model(words),
    )
    return next(filter(None, checks), None)


def values(words: Sequence[str], flag: str) -> list[str]:
    """What follows a flag, each time that it is given: `--flag value` or `--flag=value`."""
    joined = [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    return joined + [value for word, value in itertools.pairwise(words) if word == flag]


def _config(words: Sequence[str]) -> str | None:
    try:
        import yaml
    except ImportError:  # vLLM brings it, and that vLLM is not installed is said next
        return None
    given = values(words, "--config")
    if words[-1:] == ["--config"]:
        return "--config names no file; write it as in --config kvq.yaml"
    if len(given) > 1:
        return "--config is given more than once; put all options into one file"
    for name in given:
        path = Path(name)
        if not path.is_file():
            return f"--config: there is no file {name}"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return f"--config: {name} is not YAML: {' '.join(str(error).split())}"
        if not isinstance(content, dict):
            return f"--config: {name} has no options; it takes lines such as kv-cache-dtype: kitty2"
    return None


def _dtype(words: Sequence[str]) -> str | None:
    for name in values(words, "--kv-cache-dtype"):
        if name not in (*FORMATS, *BUDGETS, *VLLM_DTYPES):
            ours = [*BUDGETS, *(fmt.name for fmt in public_formats())]
            close = difflib.get_close_matches(name, [*ours, *VLLM_DTYPES], n=1)
            known = f"did you mean {close[0]}?" if close else f"the formats are {', '.join(ours)}"
            return f"--kv-cache-dtype: there is no format {name!r}; {known}"
    return None


def _options(words: Sequence[str]) -> str | None:
    for text in values(words, "--additional-config"):
        try:
            found = json.loads(text, object_pairs_hook=_once)
        except _Twice as twice:
            return f"--additional-config gives {str(twice)!r} twice; leave one of them out"
        except ValueError as error:
            return f"""--additional-config is not JSON ({error}); write it as in '{{"kvq": {{"W": 64}}}}'"""
        if not isinstance(found, dict):
            return f"""--additional-config is {text}; it takes an object, as in '{{"kvq": {{"W": 64}}}}'"""
        if problem := misspelled(found, not {*values(words, "--kv-cache-dtype")} & {*VLLM_DTYPES}):
            return str(problem)
    return None


class _Twice(ValueError):
    """A name that an object has twice, of which JSON's readers take the last."""


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(name)
        found[name] = value
    return found


def _memory(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    for text in values(words, "--kv-cache-memory-bytes"):
        try:
            nbytes = size_for_vllm(text)
        except ValueError:
            nbytes = -1
        if nbytes < 0:
            return f"--kv-cache-memory-bytes is {text or 'empty'}; write it as in --kv-cache-memory-bytes 4G"
    space = environment.get(SPACE)
    if space and not space.isdigit():
        return f"{SPACE} is {space!r}; it takes whole GiB, as in {SPACE}=4"
    return None


def _block_size(words: Sequence[str]) -> str | None:
    for text in values(words, "--block-size"):
        if not text.isdecimal() or not int(text):
            return f"--block-size is {text}; it takes the tokens of a page, as in --block-size {DEFAULT_N}"
    return None


def _model(words: Sequence[str]) -> str | None:
    if not words or (words[0] in OURS and len(words) == 2):
        return "name a model: a checkpoint folder, or a name on the model hub"
    first = [] if words[0].startswith("-") else [words[0]]
    named = [*first, *values(words, "--model"), *values(words, "--tokenizer")]
    return next(filter(None, map(name_problem, named)), None)
