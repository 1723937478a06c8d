"""Traces of requests run on the real engine, judged by plain vLLM and by our reference.

    trace.py       an engine's requests, and what it answered and did
    engine.py      runs traces on the real engine and writes down the scheduler's steps, with computed.py
    forked.py      engines in their own processes; warm.py and preload.py make them start quickly
    interpreted.py the model runner of GPUs, on a CPU; preload_v2.py for engines that request it
    lives.py       the scheduler's steps as what each request computed
    reference.py   the reference cache: attention over a format, from positions only
    replay.py      a model over it, step by step
    whole.py       the same for all steps at once; plan.py determines what each token reads
    pictures.py    images in prompts: vLLM's prompt, and the embeddings and positions that the model is given
    attention.py   how both replace the attention of a Transformers model
    compare.py     two engines' answers, token by token
    judge.py       an engine's answers against the reference
    verdict.py     the findings of either

The engine is observed, not changed: it gives the same answers to users.
"""
