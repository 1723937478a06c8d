"""Quality of the formats, each measure with a command.

`eval error` needs no vLLM. `eval MODEL` runs real engines, each in a process of its own, and only what runs there
(worker.py, forced.py, preload.py) imports vllm, by its public interface.
"""
