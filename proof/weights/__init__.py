"""Real pretrained models, from packages of the Python index that ship their weights as GGUF files."""
