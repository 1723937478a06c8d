"""What every format must do, checked in seconds and without vLLM: `vllm-kvq conformance --formats NAME`."""
