"""Real engines, in processes of their own, which run traces and write down what their schedulers did.

engine.py               runs traces and writes the steps down, with computed.py, groups.py and shared.py
forked.py               one engine per process; warm.py and preload.py make it start quickly
far.py                  pools beyond 4 GiB, of which only the blocks in use take memory
without_torchvision.py  models that see images, without that package
interpreted.py          the model runner of GPUs, on a CPU; preload_v2.py and vllm_v2.py for engines that request it
"""
