"""What commands let vLLM and our kernels log."""

from __future__ import annotations

import logging
import os
import warnings


def let_kernels_log() -> None:
    """Compiling the kernels takes minutes, and reports progress."""
    ours = logging.getLogger("vllm_kvq")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())


def be_quiet() -> None:
    """For vLLM, which reads its log level on import, and for the processes that it starts."""
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    for name in ("vllm", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
