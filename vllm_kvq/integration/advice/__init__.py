"""What is known to go badly with a model, in a sentence."""
