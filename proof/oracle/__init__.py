"""Traces of requests run on the real engine, judged by plain vLLM and by our reference.

    trace.py       an engine's requests, and what it answered and did
    engines/       runs traces on real engines and writes down the scheduler's steps
    reference/     computes what they must have answered
    pictures.py    images in prompts: vLLM's prompt, and the embeddings and positions that the model is given
    adapters.py    LoRA: vLLM's request for one, and what the reference adds
    structured.py  answers of some letters: a grammar for vLLM, a mask of tokens for the judge
    compare.py     two engines' answers, token by token
    judge.py       an engine's answers against the reference
    verdict.py     the findings of either

The engine is observed, not changed: it gives the same answers to users.
"""
