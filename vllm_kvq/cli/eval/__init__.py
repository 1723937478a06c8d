"""`vllm-kvq eval ...`: arguments and tables; what is evaluated is in vllm_kvq/eval/."""
