"""The one table of formats. Command line, docs, tests, kernels and the integration look everything up here.

A format is declared at the end of its method's file. The table finds it through an entry point: built-in formats
through those below, third parties' formats through those that their packages declare in the group `vllm_kvq.formats`
(value: a `Format`, or a tuple of them). The methods of other projects (`vllm_kvq.eval.peers`) are built in, but they
belong to the evaluation, so the table names them in a string, as a third party would, and imports nothing from there.
Third parties' packages are imported only once a name that is not built in is looked up, or all names are requested. A
format that can't be used is reported in a warning, and in the error when its name is used.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.codec import Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.settings import COMMON, Settings, check_names

logger = logging.getLogger("vllm_kvq")
DEFAULT_N = 64
PLAIN = "auto"
"""vLLM's own cache in the model's dtype: the baseline for all others."""
GROUP = "vllm_kvq.formats"
METHODS = ("squat", "qjl", "polar", "innerq", "kivi", "kitty", "klt", "lossless")
BUILT_IN = (
    *(EntryPoint(name, f"vllm_kvq.formats.methods.{name}:FORMATS", GROUP) for name in METHODS),
    EntryPoint("peers", "vllm_kvq.eval.peers:FORMATS", GROUP),
)
VLLM_DTYPES = (
    PLAIN, "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
)  # fmt: skip
"""The values that vLLM's --kv-cache-dtype takes without this plugin."""


@dataclass(frozen=True)
class Format:
    """The name that users type, the two codecs, and defaults that differ from the options' own."""

    name: str
    title: str
    keys: type[KeyCodec]
    values: type[ValueCodec]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    public: bool = True
    """Whether lists for users include it."""
    usual: int | None = None
    """Its rank among the few formats that long measurements use by default; None: it is not among them.
    The first is the recommended format."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"format name {self.name!r} is not made of lowercase letters, digits and underscores")
        unread = set(self.defaults) - {option.name for option in (*COMMON, *self._own)}
        if unread:
            raise ValueError(f"format {self.name!r} sets option {min(unread)!r}, which its codecs don't declare")
        Settings.of(self.keys, self.values, self.defaults)

    @property
    def _own(self) -> tuple[Option, ...]:
        return (*self.keys.options, *self.values.options)

    def settings(self, options: Mapping[str, Any] | None = None) -> Settings:
        """The user's options over the defaults; each must be known, in range and read by a codec in use."""
        chosen = dict(options or {})
        keys = key_codecs()[_chosen_codec("keys", chosen)] if "keys" in chosen else self.keys
        values = value_codecs()[_chosen_codec("values", chosen)] if "values" in chosen else self.values
        check_names(self.name, keys, values, chosen, readers)
        # a default carries over to another codec if that codec declares the same option
        own, shared = {option.name: option for option in self._own}, {*keys.options, *values.options}
        defaults = {name: x for name, x in self.defaults.items() if name not in own or own[name] in shared}
        return Settings.of(keys, values, {**defaults, **chosen})

    def bind(self, geometry: Geometry, options: Mapping[str, Any] | None = None) -> PageFormat:
        s = self.settings(options)
        if pairing := s.get("pairing"):
            geometry = replace(geometry, pairing=pairing)
        keys, values = s.keys.bind(geometry, s.of_codec(s.keys)), s.values.bind(geometry, s.of_codec(s.values))
        return PageFormat(self.name, geometry, s, keys, values)

    def bits_per_element(self, head_size: int, block_size: int = DEFAULT_N, **options: Any) -> float:
        """Bits per cached element, keys and values averaged, counted from the byte layout with all overhead."""
        return self.bind(Geometry(head_size, block_size), options).bits_per_element

    def capacity_factor(self, head_size: int, block_size: int = DEFAULT_N, **options: Any) -> float:
        """How many times more tokens than 16-bit pages the packed pages hold (sidecars and sinks not counted)."""
        return 16 / self.bits_per_element(head_size, block_size, **options)


# -- where formats come from -----------------------------------------------------------------------------------------
@functools.cache
def _built_in() -> dict[str, Format]:
    return {fmt.name: fmt for point in BUILT_IN for fmt in point.load()}


@dataclass(frozen=True)
class ThirdParties:
    formats: Mapping[str, Format]
    problems: Mapping[str, str]
    """Name -> a sentence on why what was declared under it can't be used."""


@functools.cache
def third_parties() -> ThirdParties:
    """The formats that other packages declare; a fault in one of them does not affect the others."""
    formats: dict[str, Format] = {}
    sources: dict[str, str] = {}
    problems: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        source = f"{point.value} of {point.dist.name}" if point.dist else point.value
        try:
            found = point.load()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            problems[point.name] = f"KV cache format {point.name!r} ({source}) can't be imported: {reason}"
            continue
        declared = found if isinstance(found, tuple) else (found,)
        if not declared or not all(isinstance(fmt, Format) for fmt in declared):
            problems[point.name] = f"KV cache format {point.name!r} ({source}) is neither a Format nor a tuple of them"
            continue
        for fmt in declared:
            if problem := _taken(fmt, formats, sources):
                problems[fmt.name] = f"KV cache format {fmt.name!r} ({source}) can't be used: {problem}"
            else:
                formats[fmt.name], sources[fmt.name] = fmt, source
    for problem in problems.values():
        logger.warning("%s", problem)
    return ThirdParties({n: f for n, f in formats.items() if n not in problems}, problems)


def _taken(fmt: Format, formats: Mapping[str, Format], sources: Mapping[str, str]) -> str | None:
    """Which of a format's names is already taken."""
    if fmt.name in _built_in():
        return "the name is that of a built-in format, which is used instead"
    if fmt.name in BUDGETS:
        return "the name is that of a budget"
    if fmt.name in VLLM_DTYPES:
        return "the name is one of vLLM's own KV cache dtypes"
    if fmt.name in formats:
        return f"{sources[fmt.name]} has the same name"
    others = [*_built_in().values(), *formats.values()]
    if any(other.keys.name == fmt.keys.name and other.keys is not fmt.keys for other in others):
        return f"another key codec has the name {fmt.keys.name!r}"
    if any(other.values.name == fmt.values.name and other.values is not fmt.values for other in others):
        return f"another value codec has the name {fmt.values.name!r}"
    return None


class _Formats(Mapping[str, Format]):
    def __getitem__(self, name: str) -> Format:
        if (fmt := _built_in().get(name) or third_parties().formats.get(name)) is None:
            raise KeyError(_unknown(name))
        return fmt

    def __iter__(self) -> Iterator[str]:
        yield from _built_in()
        yield from third_parties().formats

    def __len__(self) -> int:
        return len(_built_in()) + len(third_parties().formats)


FORMATS: Mapping[str, Format] = _Formats()


def public_formats() -> list[Format]:
    """The formats that lists for users include."""
    return [fmt for fmt in FORMATS.values() if fmt.public]


def suite(which: str) -> tuple[str, ...]:
    """The formats that a command uses by default; their membership is declared with each format.

    public      those that lists for users include: for measurements of seconds per format
    usual       the few of them that are declared usual, in their order: for measurements of minutes
    methods     the first one of each key codec: for checks of code rather than of numbers of bits
    """
    public = public_formats()
    if which == "public":
        found = public
    elif which == "usual":
        found = sorted((fmt for fmt in public if fmt.usual is not None), key=lambda fmt: (fmt.usual, fmt.name))
    elif which == "methods":
        found = list({fmt.keys.name: fmt for fmt in reversed(public)}.values())[::-1]
    else:
        raise ValueError(f"suite {which!r} is not one of public, usual, methods")
    return tuple(fmt.name for fmt in found)


def get_format(name: str) -> Format:
    if name not in FORMATS:
        _refuse(name)
    return FORMATS[name]


def label(name: str, options: Mapping[str, Any]) -> str:
    """A format with options as users write it, in one word: `squat2:W=64,r=8`."""
    text = ",".join(f"{option}={_written(value)}" for option, value in sorted(options.items()))
    return f"{name}:{text}" if text else name


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def changed(name: str, settings: Settings) -> dict[str, Any]:
    """The codecs and their options that are not the format's own; not W, S and N, which every format has."""
    own, codecs = get_format(name), {"keys": settings.keys.name, "values": settings.values.name}
    others: dict[str, Any] = {half: codec for half, codec in codecs.items() if codec != getattr(own, half).name}
    usual = dict(own.settings(others).own)
    return others | {option: value for option, value in settings.own if value != usual[option]}


def _refuse(name: str) -> NoReturn:
    if problem := third_parties().problems.get(name):
        raise ValueError(problem)
    raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    if name in BUDGETS:
        formats = " or ".join(BUDGETS[name].formats)
        return (
            f"{name!r} is a budget, which means {formats}, depending on model and server; name the format, or ask "
            f"`vllm-kvq check MODEL --kv-cache-dtype {name}` for it"
        )
    known = [fmt.name for fmt in public_formats()]
    close = difflib.get_close_matches(str(name), known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown KV cache format {name!r}; {meant}known formats are {', '.join(known)}"


# -- what all of them declare ----------------------------------------------------------------------------------------
def key_codecs() -> dict[str, type[KeyCodec]]:
    """Key codecs by the name that the option `keys` takes."""
    return {fmt.keys.name: fmt.keys for fmt in FORMATS.values() if fmt.keys.public}


def value_codecs() -> dict[str, type[ValueCodec]]:
    """Value codecs by the name that the option `values` takes."""
    return {fmt.values.name: fmt.values for fmt in FORMATS.values() if fmt.values.public}


def codec_options() -> tuple[Option, Option]:
    """`keys` and `values`, which choose the codecs."""
    return (
        Option("keys", "key codec", choices=tuple(key_codecs())),
        Option("values", "value codec", choices=tuple(value_codecs())),
    )


def _chosen_codec(half: str, options: dict[str, Any]) -> str:
    name = options.pop(half)
    if name is None:
        raise ValueError(f"option {half!r} is null; leave it out to get the default")
    next(option for option in codec_options() if option.name == half).check(name)
    return str(name)


def declared_options() -> list[tuple[Option, tuple[str, ...]]]:
    """Every option that users may set, with the codecs that read it; no codecs if every format does."""
    found: dict[Option, list[str]] = {option: [] for option in (*codec_options(), *COMMON)}
    for codec in (*key_codecs().values(), *value_codecs().values()):
        for option in codec.options:
            found.setdefault(option, []).append(codec.name)
    return [(option, tuple(dict.fromkeys(names))) for option, names in found.items()]


def readers() -> dict[str, tuple[str, ...]]:
    """Name of an option -> the codecs that read it."""
    found: dict[str, tuple[str, ...]] = {}
    for option, names in declared_options():
        found[option.name] = tuple(dict.fromkeys((*found.get(option.name, ()), *names)))
    return found
