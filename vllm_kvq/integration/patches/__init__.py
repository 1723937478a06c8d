"""What this plugin changes in vLLM: one object per patch, one small file per family. registry.py lists them all."""
