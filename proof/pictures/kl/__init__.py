"""KL divergence against bits, from recorded evaluations."""
