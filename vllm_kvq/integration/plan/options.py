"""The user's options, parsed once: the one place that reads `--kv-cache-dtype` and `--additional-config`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kvq.formats import FORMATS, Geometry, PageFormat, get_format
from vllm_kvq.formats.by_layer import ByLayer, all_options, options_at, schedules
from vllm_kvq.formats.settings import Settings
from vllm_kvq.formats.table import readers
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CALIBRATION = "calibration"
"""An option of servers only: formats by themselves are handed constants."""


@dataclass(frozen=True)
class Options:
    """A format and what the user asked of it, checked for every layer."""

    name: str
    given: Mapping[str, Any] = field(hash=False)
    """Only what the user wrote; some of it may be given by layer."""
    calibration: str | None = None
    """The file of a calibrated format's constants (calibration.py); None: the server finds or makes one."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Options:
        """ValueError, with a sentence, for options that no layer could have."""
        return cls.checked(vllm_config.cache_config.cache_dtype, under_kvq(vllm_config))

    @classmethod
    def checked(cls, name: str, given: Any) -> Options:
        """The same, from a format's name and what is under "kvq"."""
        if not isinstance(given, Mapping):
            raise ValueError(f"additional config 'kvq' is {given!r}; it must be an object of options")
        fmt, given = get_format(name), dict(given)
        calibration = given.pop(CALIBRATION, None)
        for options in all_options(given):
            settings = fmt.settings(options)
            if calibration is not None and not settings.calibrated:
                raise ValueError(f"option {CALIBRATION!r} is not read by {fmt.name}, which has nothing to calibrate")
        if not isinstance(calibration, str | None):
            raise ValueError(f"option {CALIBRATION!r} is {calibration!r}; it takes the name of a file")
        return cls(fmt.name, given, calibration)

    @property
    def settings(self) -> Settings:
        """What all layers have in common (`by_layer.SHARED`): the format's defaults and the user's options."""
        return self.at(None)

    @property
    def schedules(self) -> list[ByLayer]:
        """The options that are given by layer."""
        return schedules(self.given)

    def at(self, layer: int | None) -> Settings:
        return get_format(self.name).settings(options_at(self.given, layer))

    def written(self, layer: int) -> str:
        """One layer's options, the same text for the same options."""
        return json.dumps(options_at(self.given, layer), sort_keys=True)

    def bind(self, geometry: Geometry) -> PageFormat:
        """The format for such heads. The same object for equal options and heads, so that layers can share work."""
        return _bind(self.name, self.written(geometry.layer), geometry)


@functools.cache
def _bind(name: str, options: str, geometry: Geometry) -> PageFormat:
    return get_format(name).bind(geometry, json.loads(options))


def under_kvq(vllm_config: VllmConfig) -> Any:
    """As the user wrote it, of any type; an empty object if there is nothing."""
    extra = vllm_config.additional_config
    return extra.get("kvq", {}) if isinstance(extra, Mapping) else {}


def unread_options(vllm_config: VllmConfig) -> Problem | None:
    """Options that nobody would read: they are outside "kvq", or no format of ours is chosen.

    A key that is none of our options may belong to another plugin.
    """
    extra, dtype = vllm_config.additional_config, vllm_config.cache_config.cache_dtype
    if not isinstance(extra, Mapping):
        return None
    if problem := misspelled(extra, dtype in FORMATS):
        return problem
    if dtype not in FORMATS:
        return _without_format(dtype) if "kvq" in extra else None
    for key, value in extra.items():
        if key in readers():
            right = json.dumps({"kvq": {key: value}})
            return Problem(f"kvq option {key!r} is outside 'kvq'", f"write --additional-config '{right}'")
    return None


def misspelled(extra: Mapping[str, Any], ours: bool) -> Problem | None:
    """A key that was meant to be "kvq". One that is only like it may be another plugin's, unless a format is `ours`."""
    for key in extra:
        if key != "kvq" and _letters(key) in ("kvq", "vllmkvq"):
            return Problem(f"additional config {key!r} is not read", "put options under 'kvq' (lowercase)")
        if ours and "kvq" not in extra and _like_kvq(key):
            return Problem(f"additional config {key!r} is not read", "did you mean 'kvq'?")
    return None


def _like_kvq(key: object) -> bool:
    """Whether it has the same letters in another order, or one fewer."""
    letters = sorted(_letters(key))
    return letters in ([*"kqv"], [*"kq"], [*"kv"], [*"qv"])


def _letters(key: object) -> str:
    return "".join(c for c in str(key).casefold() if c.isalnum())


def _without_format(dtype: str) -> Problem:
    return Problem(
        f"kvq options are given, and --kv-cache-dtype {dtype} reads none of them",
        "choose one of our formats (vllm-kvq formats lists them), or leave the options out",
    )
