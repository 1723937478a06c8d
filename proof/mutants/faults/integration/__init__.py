"""Faults in vllm_kvq/integration."""
