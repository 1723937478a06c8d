"""One vLLM engine in a process of its own, and what it is told."""
