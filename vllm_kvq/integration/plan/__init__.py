"""From vLLM's configuration to one frozen plan: what is served, and what is refused. Runs in every process."""
