"""This package's environment variables are made known to vLLM, which otherwise warns of them, or refuses them with
--fail-on-environ-validation.

Only those that are set: every known variable is part of the key of vLLM's compile cache.
"""

from __future__ import annotations

import functools
import os

from vllm_kvq.integration.patches.patch import Hooks, Patch
from vllm_kvq.kernels.variables import VARIABLES

KNOWN = "vllm.envs:environment_variables"


def make_known(_: Hooks) -> None:
    from vllm import envs

    for name in VARIABLES.keys() & os.environ.keys():
        envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def _are_known() -> bool:
    from vllm import envs

    return VARIABLES.keys() & os.environ.keys() <= envs.environment_variables.keys()


VARIABLES_KNOWN = Patch(
    what="VLLM_KVQ_* added to the known environment variables",
    why="vLLM warns of variables that begin with VLLM_ and are not its own",
    until="plugins may register variables",
    needs=(KNOWN,),
    install=make_known,
    active=_are_known,
)
