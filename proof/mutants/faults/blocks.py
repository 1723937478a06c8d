"""Faults in what a request's blocks hold: damage, companions, pages that requests share."""

from __future__ import annotations

from proof.mutants.fault import Fault

ROOM = "vllm_kvq/integration"
CAPACITY = "tests/engine/test_capacity.py -k vllms_count"
DAMAGE = "tests/engine/test_damage.py"
COMPANIONS = "tests/engine/test_companions.py"
TRAFFIC = "tests/kernels/test_cpu_decode.py -k 'random_traffic and squat2'"

FAULTS: tuple[Fault, ...] = (
    # -- damage and stale sidecars
    Fault(
        "damage is never counted",
        f"{ROOM}/worker/report.py",
        "        if not new:\n            return\n        self.total += new\n",
        "        if new:\n            return\n        self.total += new\n",
        DAMAGE,
    ),
    Fault(
        "a layer drops what its step says about damage",
        f"{ROOM}/worker/layer.py",
        "self.damage.count(self.step.run(batch, caches, query, key, value, output))",
        "self.step.run(batch, caches, query, key, value, output)",
        DAMAGE,
    ),
    Fault(
        "the watch of a GPU's counters never raises",
        f"{ROOM}/worker/faults.py",
        "        if stale:\n",
        "        if stale < 0:\n",
        DAMAGE,
    ),
    Fault(
        "nobody polls a GPU's counters",
        f"{ROOM}/worker/backend.py",
        "        for watch in self.watches:\n            watch.poll()\n",
        "",
        DAMAGE,
    ),
    Fault(
        "PyTorch's packing does not count damaged values",
        "vllm_kvq/kernels/torch/pack.py",
        "replaced += lost_k + lost_v",
        "replaced += lost_k",
        DAMAGE,
    ),
    Fault(
        "the host takes a sidecar of other tokens for its own",
        "vllm_kvq/kernels/torch/plan.py",
        "        if stale.any():\n",
        "        if stale.all():\n",
        f"{DAMAGE} -k 'PyTorch'",
    ),
    # -- companions' blocks
    Fault(
        "a sidecar claims one block too few",
        f"{ROOM}/core/manager.py",
        "new = self.block_pool.get_new_blocks(self.blocks_per_request)",
        "new = self.block_pool.get_new_blocks(max(1, self.blocks_per_request - 1))",
        COMPANIONS,
    ),
    Fault(
        "fresh sidecars are not zeroed",
        f"{ROOM}/core/manager.py",
        "        if self._record_new_block_ids and record_for_zeroing:\n",
        "        if not self._record_new_block_ids and record_for_zeroing:\n",
        COMPANIONS,
    ),
    Fault(
        "admission forgets the pages of a hit that leave the free queue",
        f"{ROOM}/core/manager.py",
        "return self._get_num_evictable_blocks(new_computed_blocks[: self.blocks_per_request])",
        "return 0",
        COMPANIONS,
    ),
    Fault(
        "a hit on sinks that is shorter than their pages is taken",
        f"{ROOM}/core/manager.py",
        "if length <= 0 or length // size < pages:",
        "if length <= 0:",
        COMPANIONS,
    ),
    Fault(
        "sinks are cached before their block is complete",
        f"{ROOM}/core/manager.py",
        "if min(num_tokens, hashed) < self.block_size or",
        "if min(num_tokens, hashed) < 1 or",
        COMPANIONS,
    ),
    Fault(
        "a hit covers the window, too",
        f"{ROOM}/core/manager.py",
        "max(min(max_length, whole - kv_cache_spec.recomputed), max_length - kv_cache_spec.recomputed, 0)",
        "max_length",
        COMPANIONS,
    ),
    Fault(
        "a companion's memory is counted by a request's length",
        f"{ROOM}/core/spec.py",
        "return self.blocks_per_request * self.page_size_bytes",
        "return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes",
        CAPACITY,
    ),
    Fault(
        "a companion's table has fewer entries than a request has blocks",
        f"{ROOM}/core/spec.py",
        "return max(self.blocks_per_request, cdiv(max_len, self.block_size))",
        "return self.blocks_per_request",
        COMPANIONS,
    ),
    Fault(
        "nothing chooses the connector that works for --kv-offloading-size",
        f"{ROOM}/plan/plan.py",
        "    choose_connector(vllm_config)\n",
        "",
        "tests/models/test_offload.py -k squat2",
    ),
    # -- pages that requests share
    Fault(
        "the host's plan packs units of a hit again",
        "vllm_kvq/kernels/torch/plan.py",
        "first, last = c // p, end // p",
        "first, last = np.maximum(c - 1, 0) // p, end // p",
        TRAFFIC,
    ),
    Fault(
        "Triton packs units of a hit again",
        "triton_kernels/pack.py",
        "begun = context // UNIT",
        "begun = tl.maximum(context - 1, 0) // UNIT",
        "tests/triton/test_step.py -k 'random_traffic and polar4'",
    ),
    Fault(
        "CUDA packs units of a hit again",
        "csrc/cuda/pack.h",
        "const int unit = context / SLAB + block_x() % p.units,",
        "const int unit = (context - (context > 0)) / SLAB + block_x() % p.units,",
        "tests/triton/test_step.py -k 'random_traffic and qjl3 and 32'",
        slow=True,
    ),
    Fault(
        "C++ packs units of a hit again in a decode step",
        "csrc/cpu/step/decode.cpp",
        "const int64_t first = r.context / p, last",
        "const int64_t first = std::max<int64_t>(r.context - 1, 0) / p, last",
        TRAFFIC,
        slow=True,
    ),
    # -- real engines
    Fault(
        "blocks that move from one kind of layers to another keep their contents, in an engine",
        f"{ROOM}/patches/zeroing.py",
        ".kv_cache[block_ids] = 0",
        ".kv_cache[block_ids[:0]] = 0",
        "tests/models/test_hits.py",
        slow=True,
    ),
)
