"""What a server would do here, without starting one: for `vllm-kvq check` and `vllm-kvq doctor`."""
