"""The demo, `make run`: it starts a server with a low-bit cache and asks it about a long text.

    serve.py                the command; capacity.py reads the server's log
    model.py, train.py      the training of its model: a small Llama that finds what lies thousands of tokens back
    texts.py, tokenizer.py  the training texts, and the tokenizer that is trained on them
    llama.py                the forward pass
    biases.py               makes its cache as hard to quantize as a large model's
    corpus.py, corpus.txt   questions and answers that it knows by heart

The model is kept in models/demo.
"""
