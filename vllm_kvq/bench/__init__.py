"""Speed measurements as plain functions; their commands are in vllm_kvq/cli/bench/."""
