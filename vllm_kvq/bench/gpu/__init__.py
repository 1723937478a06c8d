"""Measurements on a GPU, which run without vLLM: decode steps, prompts, and a file that keeps every number."""
