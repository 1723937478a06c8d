"""What runs in vLLM's engine core: the specs of caches, and who owns their blocks."""
