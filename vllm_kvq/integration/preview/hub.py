"""Whether a model's name can be looked up: without that, vLLM and Transformers try for up to a minute, and name neither
the folder that was meant nor the way out."""

from __future__ import annotations

import functools
import os
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from vllm_kvq.problem import Problem

SECONDS = 5.0
"""The time that a hub has to accept a connection."""
PATHS = ("/", "./", "../", "~")
GGUF = ".gguf"
CONFIGS = ("config.json", "params.json")
"""A checkpoint's folder has one of these: Hugging Face's name for a model's description, and Mistral's."""
NAME = "name a checkpoint's folder, or a model on the hub"


def name_problem(name: str) -> Problem | None:
    """Why this can't be the name of a model: it is empty, a file, or a path that does not exist."""
    if not name.strip():
        return Problem("the model's name is empty", NAME)
    path = Path(name)
    if path.is_file():
        return Problem(f"{name} is a file", "name the folder that holds the checkpoint's config.json")
    if name.startswith(PATHS) and not path.expanduser().exists():
        return Problem(f"there is no folder {name}", NAME)
    if not path.is_dir() and path.suffix == GGUF and path.parent == Path():
        return Problem(
            f"there is no file {name}", f"name a checkpoint's folder, or a file on the hub as in OWNER/MODEL/{name}"
        )
    return None


def folder_problem(name: str) -> Problem | None:
    """Why this folder is not a checkpoint's; None for whatever is not a folder."""
    if not (path := Path(name)).is_dir() or any((path / config).is_file() for config in CONFIGS):
        return None
    return Problem(f"the folder {name} has no {CONFIGS[0]}, so it holds no checkpoint", NAME)


def model_problem(name: str, revision: str | None = None) -> Problem | None:
    """Why no model `name` can be had: all that is known before it is read."""
    return name_problem(name) or folder_problem(name) or hub_problem(name, revision)


@functools.cache
def hub_problem(name: str, revision: str | None = None) -> Problem | None:
    """Why `name` can't be had; None for a folder, for what is cached, and where the model hub answers. Asked once."""
    if problem := name_problem(name):
        return problem
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from vllm_kvq.integration.plan.model.weights import weights_folder

    # stores and hubs that vLLM reads by itself
    if ":" in name or os.environ.get("VLLM_USE_MODELSCOPE"):
        return None
    model = str(Path(name).parent) if name.endswith(GGUF) else name
    if weights_folder(model, revision) is not None:
        return None
    try:
        validate_repo_id(model)
    except HFValidationError:
        return Problem(f"there is no folder {name}, and no model on the hub can have that name", NAME)
    # a proxy reaches what we can't
    if urllib.request.getproxies():
        return None
    nowhere = f"there is no folder {name}, and no such model in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        return Problem(nowhere, "name a folder, or unset HF_HUB_OFFLINE to download it")
    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or {"http": 80}.get(hub.scheme, 443)
        socket.create_connection((hub.hostname or "", port), SECONDS).close()
    except OSError:
        return Problem(
            f"{nowhere}, and {constants.ENDPOINT} can't be reached", "name a folder, or another hub with HF_ENDPOINT"
        )
    return None
