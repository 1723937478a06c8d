"""Patches that are installed when vLLM loads its plugins: in every process, whatever cache it serves."""
