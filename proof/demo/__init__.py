"""What `make run` does: it starts a server with a low-bit cache and asks it what a long text says.

    serve.py                the command
    model.py, train.py      how its model was trained: a small Llama that finds what stands thousands of tokens back
    texts.py, llama.py      on which texts, and its forward pass
    outliers.py             makes its cache as hard to quantize as a large model's
    corpus.py, corpus.txt   questions and answers that it knows by heart

The model is kept in models/demo.
"""
