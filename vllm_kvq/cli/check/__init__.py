"""`vllm-kvq check`: with a format (one.py), with all (every.py), and arguments that can't be meant (words.py)."""
