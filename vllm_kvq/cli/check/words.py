"""Arguments of `vllm-kvq check` that can't be meant, found in the words themselves: vLLM takes seconds to load."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_kvq.cli.arguments import size_for_vllm
from vllm_kvq.cli.check.config_file import FLAG as CONFIG
from vllm_kvq.cli.check.config_file import Unreadable, config_words
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.settings import BLOCK
from vllm_kvq.formats.table import DEFAULT_N, FORMATS, VLLM_DTYPES, public_formats, readers
from vllm_kvq.integration.plan.memory import space_problem
from vllm_kvq.integration.plan.options import Options, misspelled
from vllm_kvq.integration.preview.hub import folder_problem, hub_problem, name_problem
from vllm_kvq.kernels.variables import values_problem, variables_problem
from vllm_kvq.meant import meant

EXAMPLES = {
    "--kv-cache-dtype": RECOMMENDED,
    "--additional-config": """'{"kvq": {"W": 64}}'""",
    "--max-model-len": "8192",
    "--block-size": str(DEFAULT_N),
    "--kv-cache-memory-bytes": "4G",
    "--model": "MODEL",
    "--tokenizer": "MODEL",
}
"""Flags that take one word and are looked at here, each with a word that it takes."""
NO_MODEL = "name a model: a checkpoint folder, or a name on the model hub"


def wrong_words(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str | None:
    """A sentence that names the argument and the way out. Nothing is looked up outside this machine."""
    words = normal(words)
    try:
        listed = listed_words(words)
    except Unreadable as error:
        return str(error)
    checks = (_valueless, _dtype, _options, _lengths, _memory, _model)
    if problem := next(filter(None, (check([*listed, *words]) for check in checks)), None):
        only_there = listed and problem not in [check(words) for check in checks]
        return f"in {values(words, CONFIG)[-1]}, {problem}" if only_there else problem
    found = (check(environment) for check in (variables_problem, values_problem, space_problem))
    return next((str(problem) for problem in found if problem), None)


def wrong_models(words: Sequence[str]) -> str | None:
    """The same for the models: folders are looked into, and the hub must be reachable for a name on it."""
    words = all_words(words)
    described = values(words, "--hf-config-path")
    for flag, revision in (("--model", "--revision"), ("--tokenizer", "--tokenizer-revision")):
        at = values(words, revision)
        for name in values(words, flag):
            looked = flag == "--model" and not described and folder_problem(name)
            if problem := looked or hub_problem(name, at[-1] if at else None):
                return str(problem)
    return None


def normal(words: Sequence[str]) -> list[str]:
    """With dashes in flags' names, where vLLM takes underscores too, and with a flag for a model that comes first."""
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
    return [flag.replace("_", "-") + equals + rest for flag, equals, rest in parts]


def all_words(words: Sequence[str]) -> list[str]:
    """Those of `--config`'s file, and then those of the command line, of which vLLM takes the last."""
    words = normal(words)
    return [*listed_words(words), *words]


def listed_words(words: Sequence[str]) -> list[str]:
    """Those of `--config`'s file; Unreadable if there is none, or more than one."""
    given = values(words, CONFIG)
    if words[-1:] == [CONFIG]:
        raise Unreadable(f"{CONFIG} names no file; write it as in {CONFIG} kvq.yaml")
    if len(given) > 1:
        raise Unreadable(f"{CONFIG} is given more than once; put all options into one file")
    return normal([word for name in given for word in config_words(name)])


def values(words: Sequence[str], flag: str) -> list[str]:
    """What follows a flag, each time that it is given: `--flag value` or `--flag=value`."""
    pairs = itertools.pairwise([*words, ""])
    joined = f"{flag}="
    return [
        word.removeprefix(joined) if word.startswith(joined) else value
        for word, value in pairs
        if word == flag or word.startswith(joined)
    ]


def _valueless(words: Sequence[str]) -> str | None:
    for word, value in itertools.pairwise([*words, "--"]):
        if word in EXAMPLES and value.startswith("--"):
            return f"{word} has no value; write it as in {word} {EXAMPLES[word]}"
    return None


def _dtype(words: Sequence[str]) -> str | None:
    for name in values(words, "--kv-cache-dtype"):
        if name not in (*FORMATS, *BUDGETS, *VLLM_DTYPES):
            ours = [*BUDGETS, *(fmt.name for fmt in public_formats())]
            close = meant(name, [*ours, *VLLM_DTYPES])
            known = f"did you mean {close}?" if close else f"the formats are {', '.join(ours)}"
            return f"--kv-cache-dtype: there is no format {name!r}; {known}"
    return None


def _options(words: Sequence[str]) -> str | None:
    dtypes = values(words, "--kv-cache-dtype")
    for text in values(words, "--additional-config"):
        try:
            found = json.loads(text, object_pairs_hook=_once)
        except _Twice as twice:
            return f"--additional-config gives {str(twice)!r} twice; leave one of them out"
        except ValueError as error:
            return f"--additional-config is not JSON ({error}); write it as in {EXAMPLES['--additional-config']}"
        if not isinstance(found, dict):
            return f"--additional-config is {text}; it takes an object, as in {EXAMPLES['--additional-config']}"
        if problem := misspelled(found, not {*dtypes} & {*VLLM_DTYPES}):
            return str(problem)
        if problem_there := _kvq(found.get("kvq", {}), dtypes[-1] if dtypes else None):
            return problem_there
    return None


def _kvq(given: Any, dtype: str | None) -> str | None:
    """Options that the format does not take, or that none takes, if a format is yet to be chosen."""
    if dtype in VLLM_DTYPES:
        return None
    if dtype is not None and dtype in FORMATS:
        return _refused(dtype, given)
    if not isinstance(given, Mapping):
        return next(_refusals(given, ()), None)
    codecs = {half: given[half] for half in ("keys", "values") if half in given}
    for name, value in given.items():
        some = _refusals({**codecs, name: value}, readers().get(name, ()))
        if (problem := next(some)) is not None and all(some):
            return problem
    return None


def _refusals(given: Any, codecs: Sequence[str]) -> Iterator[str | None]:
    """What each format with one of these codecs says; all formats, if no codec is named."""
    for fmt in FORMATS.values():
        if not codecs or {fmt.keys.name, fmt.values.name} & {*codecs}:
            yield _refused(fmt.name, given)


def _refused(name: str, given: Any) -> str | None:
    try:
        Options.checked(name, given)
    except ValueError as error:
        return str(error)
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


def _memory(words: Sequence[str]) -> str | None:
    for text in values(words, "--kv-cache-memory-bytes"):
        if (_size(text) or 0) < 1:
            return f"--kv-cache-memory-bytes is {text or 'empty'}; write it as in --kv-cache-memory-bytes 4G"
    return None


def _size(text: str) -> int | None:
    try:
        return size_for_vllm(text)
    except ValueError:
        return None


def _lengths(words: Sequence[str]) -> str | None:
    for text in values(words, "--max-model-len"):
        if text.lower() not in ("auto", "-1") and (_size(text) or 0) < 1:
            return (
                f"--max-model-len is {text or 'empty'}; it takes the tokens of the longest request, as in "
                "--max-model-len 8192, or auto"
            )
    ours = {*values(words, "--kv-cache-dtype")}.isdisjoint(VLLM_DTYPES)
    for text in values(words, "--block-size"):
        number = int(text) if text.isdecimal() else 0
        if number < 1 or (ours and (number < BLOCK.low or number > BLOCK.high or number % BLOCK.multiple)):
            takes = f"it takes the tokens of a page, {BLOCK.allowed}, as in --block-size {DEFAULT_N}"
            return f"--block-size is {text or 'empty'}; {takes}"
    return None


def _model(words: Sequence[str]) -> str | None:
    named = [*values(words, "--model"), *values(words, "--tokenizer")]
    if not named and not _beside(words):
        return NO_MODEL
    return next((str(problem) for problem in map(name_problem, named) if problem), None)


def _beside(words: Sequence[str]) -> list[str]:
    """Words that are neither flags that take one word nor the words they take: one may be a model."""
    pairs = itertools.pairwise(["", *words])
    one_word = (*EXAMPLES, CONFIG)
    return [word for before, word in pairs if before not in one_word and word.partition("=")[0] not in one_word]
