"""Speed and capacity, from recorded benchmarks and the formats' bytes."""
