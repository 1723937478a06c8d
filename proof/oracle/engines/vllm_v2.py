"""vLLM's command line with its V2 model runner on a CPU (`interpreted`).

    python -m proof.oracle.engines.vllm_v2 serve MODEL ...

Processes that vLLM spawns import this module again, before vLLM.
"""

from __future__ import annotations

from proof.oracle.engines.interpreted import keep_async_scheduling, serve_v2

serve_v2()


def main() -> None:
    from vllm.entrypoints.cli import main as command_line
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    keep_async_scheduling()
    command_line.main()


if __name__ == "__main__":
    main()
