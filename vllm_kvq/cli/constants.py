"""`vllm-kvq calibrate MODEL --text FILE`: constants of calibrated formats, fitted to a text of the user's.

What can be refused without vLLM is refused before it loads.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvq import console
from vllm_kvq.formats.by_layer import options_at
from vllm_kvq.formats.table import FORMATS, get_format

if TYPE_CHECKING:
    from vllm_kvq.eval.choice import Choice

FILE = "kvq.safetensors"
OTHERS = ("--bits", "--context", "--seed")
"""Flags that have nothing to do with constants."""
INSTEAD = "use --kv-cache-dtype kitty2"
STATES = ("mamba", "ssm_", "linear_num_", "linear_attn", "hybrid_", "attn_layer_", "attn_type_list", "conv_L_cache")
"""How settings of layers without attention begin in config.json."""


@dataclass(frozen=True)
class Text:
    path: Path
    content: str


def text_file(name: str) -> Text:
    """The type of --text."""
    path = Path(name)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file, and repeat --text for more")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise argparse.ArgumentTypeError(f"there is no file {path}; name a file of text") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} can't be read ({error.strerror}); name a file of text") from None
    if not content.strip():
        raise argparse.ArgumentTypeError(f"{path} is empty; name a file of text")
    try:
        if b"\0" in content:
            raise ValueError
        return Text(path, content.decode("utf-8"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{path} is not text in UTF-8; convert it, or name another file") from None


def wrong_usage(args: argparse.Namespace, given: Sequence[str]) -> str | None:
    """What is wrong with the words that the user wrote, as far as the model's folder tells."""
    flags = {word.partition("=")[0] for word in given}
    if wrong := next((flag for flag in OTHERS if flag in flags), None):
        return f"{wrong} is for choosing a format, and --text for a format's constants; leave out one of them"
    if "--formats" not in flags:
        args.formats = _calibrated()
    for choice in args.formats:
        if not _has_constants(choice):
            known = ", ".join(c.format for c in _calibrated())
            return f"--formats: {choice.label} has no constants that a server fits; there are {known}"
    if args.out and len(_by_file(args.formats)) > 1:
        return "--out takes the constants of one kind of format, and these have several; name fewer in --formats"
    return _wrong_model(args.model) or _wrong_text(args.model, args.text)


def _has_constants(choice: Choice) -> bool:
    settings = get_format(choice.format).settings(options_at(choice.options, None))
    codecs = (settings.keys, settings.values)
    return any(c.calibrated for c in codecs) and all(c.reference_only is None for c in codecs)


def _calibrated() -> list[Choice]:
    from vllm_kvq.eval.choice import Choice

    return [choice for choice in map(Choice, FORMATS) if _has_constants(choice)]


def _by_file(chosen: Sequence[Choice]) -> Mapping[str, list[Choice]]:
    """Formats whose constants are the same."""
    found: dict[str, list[Choice]] = {}
    for choice in chosen:
        settings = get_format(choice.format).settings(options_at(choice.options, None))
        codecs = [codec.name if codec.calibrated else None for codec in (settings.keys, settings.values)]
        found.setdefault(json.dumps([codecs, choice.options.get("skip_layers")]), []).append(choice)
    return found


def folder_of(model: str) -> Path:
    from vllm_kvq.eval.demo import demo_model
    from vllm_kvq.eval.model import DEMO

    return demo_model() if model == DEMO else Path(model)


def _wrong_model(model: str) -> str | None:
    from vllm_kvq.integration.preview.hub import hub_problem

    folder = folder_of(model)
    if not folder.is_dir():
        problem = hub_problem(model)
        return None if problem is None else str(problem)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return f"the folder {model} has no config.json that can be read, so it holds no checkpoint; name another one"
    return f"constants are not fitted to hybrid models, as {model} is; {INSTEAD}" if _hybrid(config) else None


def _hybrid(config: Mapping[str, Any]) -> bool:
    """Whether the model is hybrid, as far as config.json says; vLLM knows all hybrid models."""
    text = config.get("text_config") or config
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    known = ("full_attention", "attention", "sliding_attention", "chunked_attention")
    return any(kind not in known for kind in kinds) or any(name.startswith(STATES) for name in text)


def _wrong_text(model: str, texts: Sequence[Text]) -> str | None:
    from vllm_kvq.integration.worker.calibration.text import LEAST, too_short

    file = folder_of(model) / "tokenizer.json"
    if sum(len(text.content.encode()) for text in texts) < LEAST or not file.is_file():
        # almost no tokenizer produces more tokens than bytes
        return too_short(sum(len(text.content.encode()) for text in texts))
    from tokenizers import Tokenizer

    tokenizer, tokens = Tokenizer.from_file(str(file)), 0
    for text in texts:
        tokens += len(tokenizer.encode(text.content, add_special_tokens=False).ids)
    return too_short(tokens)


# -- the work ---------------------------------------------------------------------------------------------------------
def main(prog: str, args: argparse.Namespace) -> int:
    from vllm_kvq.integration.plan.calibration import write
    from vllm_kvq.integration.preview.apart import Failed
    from vllm_kvq.integration.preview.constants import Server, fitted

    found: list[dict[str, Any]] = []
    try:
        for alike in _by_file(args.formats).values():
            folder = folder_of(args.model)
            model = str(folder) if folder.is_dir() else args.model
            server = Server(model, alike[0].format, alike[0].options, args.dtype or "auto")
            made = fitted(server, [text.content for text in args.text])
            path = args.out / FILE if args.out else made.path
            if path is None:
                return console.fail(
                    prog, "there is no usual place for the constants; name a folder with --out", args.json
                )
            try:
                write(path, made.constants, made.belongs)
            except OSError as error:
                problem = f"{path} can't be written ({error.strerror}); name another folder with --out"
                return console.fail(prog, problem, args.json)
            found.append(
                {
                    "formats": [choice.label for choice in alike],
                    "tokens": made.tokens,
                    "constants": made.digest,
                    "file": str(path),
                    "serve": serve(args, model, alike[0], path),
                }
            )
    except (Failed, ValueError, OSError) as error:
        return console.fail(prog, error, args.json)
    if args.json:
        console.show_json({"model": args.model, "files": found})
        return console.DONE
    for file in found:
        print(
            f"{', '.join(file['formats'])}: constants={file['constants']}, fitted to {file['tokens']:,} tokens, are in "
            f"{file['file']}; serve with them: {file['serve']}"
        )
    return console.DONE


def serve(args: argparse.Namespace, model: str, choice: Choice, path: Path) -> str:
    """The command whose server finds the constants."""
    options = {**choice.options, **({"calibration": str(path.absolute())} if args.out else {})}
    words = ["vllm", "serve", model, "--kv-cache-dtype", choice.format]
    words += ["--dtype", args.dtype] if args.dtype else []
    words += ["--additional-config", json.dumps({"kvq": options})] if options else []
    return shlex.join(words)
