"""What `vllm serve` would make of its arguments here, without loading weights: for `vllm-kvq check`.

vLLM's own parser and configuration, and so the product's own refusals, which the configuration runs into.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.integration import compat
from vllm_kvq.integration.patches import registry
from vllm_kvq.integration.preview.hub import hub_problem
from vllm_kvq.meant import SURE, meant
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.cli.types import CLISubcommand

    from vllm_kvq.integration.plan.budgets import Chosen
    from vllm_kvq.integration.plan.served import Served

PLUGIN = "kvq"


class WrongUsage(ValueError):
    """The arguments are not such that vLLM would serve a format of ours."""


class NoFormat(WrongUsage):
    """They name no KV cache dtype at all."""


class WouldNotStart(Exception):
    """One sentence that says why."""


def plugin_problem() -> Problem | None:
    """Why vLLM would not know our formats: needs no vllm to answer."""
    if find_spec("vllm") is None:
        return Problem("vLLM is not installed", "install vllm-kvq[cpu], or vllm-kvq[gpu] for an NVIDIA GPU")
    if PLUGIN not in entry_points(group="vllm.general_plugins").names:
        return Problem("the plugin is not installed, only its sources are on the path", "pip install vllm-kvq")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return Problem(f"VLLM_PLUGINS is {allowed!r} and leaves {PLUGIN!r} out", "add it, or unset the variable")
    return compat.plugin_problem() or compat.names_problem(compat.NEEDED_BY_CHECK) or check_problem()


def check_problem() -> Problem | None:
    """What `vllm-kvq check` itself lacks in this vLLM."""
    own = (patch for patch in registry.PATCHES if patch.moment is None)
    return next(filter(None, (patch.problem() for patch in own)), None)


@dataclass(frozen=True)
class DryStart:
    vllm_config: VllmConfig
    served: Served
    """What a server would have."""
    chosen: Chosen | None = None
    """The format, where the arguments name a budget."""


def serve_parser() -> tuple[argparse.ArgumentParser, CLISubcommand]:
    """vLLM's parser with `serve` as its only command, and that command."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm-kvq check")
    (serve,) = cmd_init()
    serve_arguments = serve.subparser_init(parser.add_subparsers(dest="subparser"))
    flags = list(serve_arguments._option_string_actions)
    for made in (parser, serve_arguments):
        made.error = functools.partial(_wrong, flags)  # type: ignore[method-assign]
    serve_arguments.prog, serve_arguments.usage = "vllm-kvq check", "vllm-kvq check MODEL --kv-cache-dtype F ..."
    return parser, serve


def _wrong(flags: Sequence[str], message: str) -> NoReturn:
    """In place of vLLM's own `error`, which prints and exits, and which does not say what flag may have been meant."""
    what, _, words = message.partition(": ")
    if what != "unrecognized arguments":
        raise WrongUsage(message)
    word = words.split()[0].partition("=")[0]
    close = meant(word, flags, SURE)
    hint = f"did you mean {close}?" if close else "vllm serve --help=all lists them"
    raise WrongUsage(f"unknown argument {word}; {hint}")


def dry_start(arguments: Sequence[str]) -> DryStart:
    """Raises WrongUsage, as for arguments that vLLM does not know, or WouldNotStart with the sentence that `vllm serve`
    would exit with."""
    if problem := plugin_problem():
        raise WouldNotStart(str(problem))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_kvq.integration import plugin
    from vllm_kvq.integration.plan.budgets import choose
    from vllm_kvq.integration.plan.plan import plan

    plugin.register()
    parser, serve = serve_parser()
    args = parser.parse_args(["serve", *arguments])
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word == "--model" or word.startswith("--model=") for word in arguments) and args.config is None:
        raise WrongUsage("name a model")
    budget, none = BUDGETS.get(args.kv_cache_dtype), args.kv_cache_dtype == "auto"
    if not none and budget is None and args.kv_cache_dtype not in FORMATS:
        raise WrongUsage(f"--kv-cache-dtype is {args.kv_cache_dtype!r}, which is not one of this plugin's formats")
    for name, revision in ((args.model, args.revision), (args.tokenizer, args.tokenizer_revision)):
        if name is not None and (problem := hub_problem(name, revision)):
            raise WrongUsage(str(problem))
    if none:
        raise NoFormat("--kv-cache-dtype is not given")
    try:
        serve.validate(args)
        made = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        if problem := compat.worker_problem(made):
            raise WouldNotStart(str(problem))
        return DryStart(made, plan(made), None if budget is None else choose(made, budget))
    except Exception as error:
        # whatever it is, the server would exit with it
        raise WouldNotStart(sentence_of(error)) from error


@contextmanager
def without_kernels() -> Iterator[None]:
    """For what is the same with all kernels, as bytes are: compiling the C++ ones first would take minutes."""
    kernels = os.environ.get("VLLM_KVQ_KERNELS")
    os.environ["VLLM_KVQ_KERNELS"] = "torch"
    try:
        yield
    finally:
        if kernels is None:
            del os.environ["VLLM_KVQ_KERNELS"]
        else:
            os.environ["VLLM_KVQ_KERNELS"] = kernels


def sentence_of(error: Exception) -> str:
    """Without what pydantic says around a sentence."""
    listed = getattr(error, "errors", None)
    if callable(listed):
        first = listed()[0]
        error = first.get("ctx", {}).get("error", error)
        if error.__class__.__module__.startswith("pydantic"):
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    text = " ".join(str(error).split())
    return text or type(error).__name__
