"""One vLLM engine in its own process, and the jobs that it is given."""
