"""Arguments that several commands share, each with one form and one meaning: a list is written with commas."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvq.formats.table import suite
from vllm_kvq.meant import meant

if TYPE_CHECKING:
    from vllm_kvq.eval.choice import Choice

ALL = "all"
CHANNELS = "channels per head"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
FORMATS = "formats, with options as in kitty2:S=8,W=64, or all"


def add_formats(p: argparse.ArgumentParser, default: str | None, why_ours: str | None = None) -> None:
    """`--formats`. `why_ours`: why the command does not take vLLM's own caches."""
    p.add_argument("--formats", type=formats(why_ours), default=default, metavar="FORMAT,...", help=FORMATS)


def formats(why_ours: str | None = None) -> Callable[[str], list[Choice]]:
    def chosen(text: str) -> list[Choice]:
        from vllm_kvq.eval.choice import choices

        try:
            found = choices(",".join(suite("public")) if text == ALL else text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        for choice in found:
            if why_ours and not choice.ours:
                raise argparse.ArgumentTypeError(f"{choice.label} is vLLM's own cache, which {why_ours}")
        return found

    return chosen


def add_head_sizes(p: argparse.ArgumentParser, default: str) -> None:
    p.add_argument("--head-size", type=head_sizes, default=default, metavar="D,...", help=CHANNELS)


def head_sizes(text: str) -> list[int]:
    """Head sizes that packed pages may have."""
    from vllm_kvq.formats.codec import HEAD_SIZES

    for size in (sizes := whole_numbers(text)):
        if size not in HEAD_SIZES:
            known = ", ".join(map(str, HEAD_SIZES))
            raise argparse.ArgumentTypeError(f"no format has heads of {size} channels; there are {known}")
    return sizes


def add_context(p: argparse.ArgumentParser, default: str | None, of: str, several: bool = False) -> None:
    kind, metavar = (whole_numbers, "TOKENS,...") if several else (whole_number, "TOKENS")
    p.add_argument("--context", type=kind, default=default, metavar=metavar, help=f"cached tokens {of}")


def add_tokens(p: argparse.ArgumentParser, default: str | None, of: str) -> None:
    p.add_argument("--tokens", type=whole_number, default=default, metavar="TOKENS", help=f"tokens to generate {of}")


def add_out(p: argparse.ArgumentParser, what: str) -> None:
    end = "" if "(default: " in what else " (default: no files)"
    p.add_argument("--out", type=folder, metavar="DIR", help=f"folder for {what}{end}")


def whole_number(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value


def from_zero(text: str) -> int:
    return whole_number(text, 0)


def whole_numbers(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",")]


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of a list of some of these words."""

    def some(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                close = meant(word, known)
                hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
                raise argparse.ArgumentTypeError(f"there is no {word!r}; {hint}")
        return text.split(",")

    return some


def size(text: str) -> int:
    """Bytes as vLLM reads them, at least one."""
    try:
        nbytes = size_for_vllm(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be greater than zero")
    return nbytes


def size_for_vllm(text: str) -> int:
    """What vLLM's --kv-cache-memory-bytes makes of these words: K to T are powers of 1024 and take no fraction, k to t
    are powers of 1000 and take one. ValueError if it refuses them."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTkmgt])", text.strip()):
        number, unit = found.groups()
        if unit.islower():
            return int(float(number) * UNITS[unit])
        if "." in number:
            raise ValueError(
                f"{text!r} has a fraction, which K, M, G and T, the powers of 1024, do not take; "
                "k, m, g and t, the powers of 1000, do"
            )
        return int(number) * UNITS[unit]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size such as 80G or 512M") from None


def folder(text: str) -> Path:
    """A folder that can be written to or created, which is found out before anything is measured."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file; name a folder")
    missing: list[Path] = []
    try:
        missing += itertools.takewhile(lambda above: not above.exists(), (path, *path.absolute().parents))
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise argparse.ArgumentTypeError(f"{path} can't be written ({why}); name another folder") from None
    finally:  # whatever else is wrong with the arguments then leaves no folder behind
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
    return path


def check_file(p: argparse.ArgumentParser, path: Path, what: str) -> None:
    """Checks that the file is there; `what` says which file is meant."""
    if not path.is_file():
        is_it = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        p.error(f"{is_it}; name {what}")
