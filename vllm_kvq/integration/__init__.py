"""Everything that touches vLLM. Formats and kernels never import this package."""
