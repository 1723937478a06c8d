"""The oracle: traces of requests run on the real engine, judged against plain vLLM and against our reference."""
