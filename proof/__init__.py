"""What proves vllm_kvq and is never installed with it: oracle, fuzzer, soak test, a machine for GPU kernels.

    oracle/         traces on the real engine, judged by plain vLLM and by a reference that knows positions alone
    fuzz/           random traces for the oracle, and the smallest one that fails
    soak/           a real server under mixed load
    ptx/            a GPU that executes the compilers' output, on a CPU
    models/         tiny checkpoints of every architecture that is served or refused
    tables/         instructions, registers, traffic: what the documents' tables are printed by
    demo/           the model that `make run` trains and asks
    probe.py        counts instructions; executes those that this processor lacks
    sanitize.py     the CPU kernels under g++'s sanitizers

It looks at the product; the product does not know it (`make lint` checks that).
"""
