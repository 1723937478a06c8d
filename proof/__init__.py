"""Instruments that prove vllm_kvq and are never installed with it: `python -m proof` lists the commands.

    oracle/     traces on the real engine, judged by plain vLLM and by a reference that knows only positions
    fuzz/       random traces for the oracle, and the smallest one that fails
    residues/   every prompt length modulo the page, by every way to cut it
    contexts/   contexts of 8k to 32k tokens on real engines, judged
    long/       long prompts of real text on a real model, `lossless` against plain vLLM
    options/    random combinations of options on every path, compared with the reference
    soak/       a real server under mixed load
    clients/    the openai package, vllm bench serve, LoRA and tools against servers with a real model
    kernels/    references for kernels; instruction counts, sanitizers
    mutants/    deliberately planted faults, one at a time: does a test notice?
    ptx/        a GPU that executes the compilers' output, on a CPU
    models/     tiny checkpoints of every architecture that is served or refused
    tables/     instructions, registers, traffic: the numbers of the documents' tables
    admit/      a release of vLLM: does it have what the patches need, and do the tests pass?
    pictures/   the documents' pictures, from recorded results and from the formats
    site/       the documents as a site, and its pages in a browser
    weights/    real pretrained models, from packages that ship their weights
    demo/       the model in models/demo, which `make run` asks and `python -m proof train` made

They inspect the product; the product does not know them (`make lint` checks that).
"""
