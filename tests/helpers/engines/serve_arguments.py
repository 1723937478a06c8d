"""A command line, given to the parser of `vllm serve`."""

from __future__ import annotations

import argparse


def parse_serve(words: list[str]) -> argparse.Namespace:
    """Exits, as the command does, if it does not know a flag or a value."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvq.integration.plugin import register

    register()
    vllm, serve, *arguments = words
    assert (vllm, serve) == ("vllm", "serve")
    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
