"""What `make run` does: it trains a small model, starts a server with a low-bit cache, and asks it a question.

    corpus.py, corpus.txt   the questions and answers
    train.py, model.py      a Llama that learns them by heart
    outliers.py             makes such a model's cache as hard to quantize as a large one's
    serve.py                the command

A model that knows its answers shows at once whether the cache is read back correctly.
"""
