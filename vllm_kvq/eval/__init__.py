"""Quality of the formats, each measure with a command. Nothing here imports vllm."""
