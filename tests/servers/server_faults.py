"""Faults for a real server: vLLM mixes this class into its workers (`--worker-extension-cls`), and its development mode
calls their methods over HTTP."""

from __future__ import annotations

from typing import Any


class ServerFaults:
    def damage_headers(self: Any) -> int:
        """From now on the sidecars of all running requests belong to other tokens; returns how many there are."""
        damaged = 0
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            packed = getattr(getattr(layer, "impl", None), "packed", None)
            if packed is not None:
                headers = packed.sidecar.slots_geometry.headers(packed.sidecar.blocks)
                running = headers[:, 0] == packed_magic()
                headers[running, 2] += 7
                damaged = int(running.sum())
        return damaged


def packed_magic() -> int:
    from vllm_kvq.kernels.slots import MAGIC

    return MAGIC
