"""Quality of the formats, each measure with a command.

`eval error` needs no vLLM. `eval MODEL` runs real engines, each in a process of its own (worker.py, forced.py), and only
these import vllm, by its public interface.
"""
