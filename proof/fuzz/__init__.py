"""The trace fuzzer: random traces on the real engine, each token judged, mismatches shrunk."""
