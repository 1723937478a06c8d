"""Checkpoints that are made here: random Llamas and their tokenizer, for benchmarks and tests."""
