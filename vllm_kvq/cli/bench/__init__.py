"""`vllm-kvq bench ...`: arguments and tables; what is measured is in vllm_kvq/bench/."""
