"""Whether a model's name can be looked up: without that, vLLM and Transformers try for up to a minute, and name neither
the folder that was meant nor the way out."""

from __future__ import annotations

import functools
import os
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

SECONDS = 5.0
"""The time that a hub has to accept a connection."""
PATHS = ("/", "./", "../", "~")


def name_problem(name: str) -> str | None:
    """What can be no name of a model: a file, and a path that does not exist."""
    path = Path(name)
    if path.is_file():
        return f"{name} is a file; name the folder that holds the checkpoint's config.json"
    if name.startswith(PATHS) and not path.expanduser().exists():
        return f"there is no folder {name}; name a checkpoint's folder, or a model on the hub"
    return None


@functools.cache
def hub_problem(name: str, revision: str | None = None) -> str | None:
    """Why `name` can't be had; None for a folder, for what is cached, and where the model hub answers. Asked once."""
    if problem := name_problem(name):
        return problem
    from huggingface_hub import constants

    from vllm_kvq.integration.plan.model.weights import weights_folder

    # stores, hubs and files that vLLM reads by itself, and proxies that reach what we can't
    by_vllm = ":" in name or name.endswith(".gguf") or os.environ.get("VLLM_USE_MODELSCOPE")
    if by_vllm or urllib.request.getproxies() or weights_folder(name, revision) is not None:
        return None
    nowhere = f"there is no folder {name}, and no such model in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        return f"{nowhere}; name a folder, or unset HF_HUB_OFFLINE to download it"
    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or {"http": 80}.get(hub.scheme, 443)
        socket.create_connection((hub.hostname or "", port), SECONDS).close()
    except OSError:
        return f"{nowhere}, and {constants.ENDPOINT} can't be reached; name a folder, or another hub with HF_ENDPOINT"
    return None
