"""What this plugin changes in vLLM: one object per patch, one small file per family, two folders for two moments.

registry.py lists them all; settings.py and uses.py list what is written and read without a patch.
"""
