"""What runs in vLLM's workers: the attention backend, and the layers with their companions."""
