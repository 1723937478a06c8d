"""What proves vllm_kvq and is never installed with it: `python -m proof` lists its commands.

    oracle/     traces on the real engine, judged by plain vLLM and by a reference that knows positions only
    fuzz/       random traces for the oracle, and the smallest one that fails
    options/    random combinations of options on every path, held against the reference
    soak/       a real server under mixed load
    kernels/    what kernels are held against; instructions counted, sanitizers
    mutants/    faults planted on purpose, one at a time: does a test notice?
    ptx/        a GPU that executes the compilers' output, on a CPU
    models/     tiny checkpoints of every architecture that is served or refused
    tables/     instructions, registers, traffic: the numbers of the documents' tables
    weights/    real pretrained models, from packages that ship their weights
    demo/       the model in models/demo, which `make run` asks and `python -m proof train` made

It looks at the product; the product does not know it (`make lint` checks that).
"""
