"""What clients do with vLLM's server, on a real pretrained model with a low-bit cache: `python -m proof clients`.

main.py        the command: servers one after the other, a table, a page of docs/results
servers.py     the servers that are started, and the cases that each one has to pass
case.py        what a case is, and how one is run
chats.py       the `openai` package: answers, streams, probabilities, samples, structured output, prefix hits
tools.py       its tools: called because they must be, and in the format that the model was taught
crowd.py       many streams at once
bench.py       `vllm bench serve`
adapters.py    LoRA: an adapter is trained in a minute, served, and asked for what only it knows
"""
