"""Quality of the formats; each measure has a command.

`eval error` needs no vLLM. `eval MODEL` runs real engines, each in its own process, and only the modules that run
there (worker.py, forced.py, preload.py) import vllm, through its public interface.
"""
