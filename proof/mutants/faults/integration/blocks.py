"""Faults in what a request's blocks hold: damage, companions, pages that requests share."""

from __future__ import annotations

from proof.mutants.fault import Fault

ROOM = "vllm_kvq/integration"
CAPACITY = "tests/planning/plan/test_capacity.py -k vllms_count"
DAMAGE = "tests/servers/test_damage.py"
COMPANIONS = "tests/engine/blocks/test_companions.py"
TRAFFIC = "tests/kernels/cpu/test_cpu_decode.py -k 'random_traffic and squat2'"

FAULTS: tuple[Fault, ...] = (
    # -- damage and stale sidecars
    Fault(
        "damage is never counted",
        f"{ROOM}/worker/report.py::Damage.count",
        "not",
        "",
        DAMAGE,
    ),
    Fault(
        "a layer drops what its step says about damage",
        f"{ROOM}/worker/layer.py::PackedLayer.run",
        "self.damage.count(self.step.run(batch, caches, query, key, value, output))",
        "self.step.run(batch, caches, query, key, value, output)",
        DAMAGE,
    ),
    Fault(
        "the watch of a GPU's counters never raises",
        f"{ROOM}/worker/faults.py::FaultWatch._judge",
        "stale:",
        "stale < 0:",
        DAMAGE,
    ),
    Fault(
        "nobody polls a GPU's counters",
        f"{ROOM}/worker/backend.py::KVQMetadataBuilder._watch",
        "for watch in self.watches:\n            watch.poll()",
        "",
        DAMAGE,
    ),
    Fault(
        "PyTorch's packing does not count damaged values",
        "vllm_kvq/kernels/torch/pack.py::pack",
        "+ lost_v",
        "",
        DAMAGE,
    ),
    Fault(
        "the host takes a sidecar of other tokens for its own",
        "vllm_kvq/kernels/torch/plan.py::Planner._check",
        "any",
        "all",
        f"{DAMAGE} -k 'PyTorch'",
    ),
    # -- companions' blocks
    Fault(
        "a sidecar claims one block too few",
        f"{ROOM}/core/manager.py::SidecarManager._claim_ring_block",
        "(self.blocks_per_request)",
        "(max(1, self.blocks_per_request - 1))",
        COMPANIONS,
    ),
    Fault(
        "fresh sidecars are not zeroed",
        f"{ROOM}/core/manager.py::SidecarManager._claim_ring_block",
        "if self",
        "if not self",
        COMPANIONS,
    ),
    Fault(
        "admission forgets the pages of a hit that leave the free queue",
        f"{ROOM}/core/manager.py::SinkManager.get_num_blocks_to_allocate",
        "return self._get_num_evictable_blocks(new_computed_blocks[: self.blocks_per_request])",
        "return 0",
        COMPANIONS,
    ),
    Fault(
        "a hit on sinks that is shorter than their pages is taken",
        f"{ROOM}/core/manager.py::SinkManager.find_longest_cache_hit",
        "or length // size < pages",
        "",
        COMPANIONS,
    ),
    Fault(
        "sinks are cached before their block is complete",
        f"{ROOM}/core/manager.py::SinkManager.cache_blocks",
        "< self.block_size",
        "< 1",
        COMPANIONS,
    ),
    Fault(
        "a hit covers the window, too",
        f"{ROOM}/core/manager.py::PackedManager.find_longest_cache_hit",
        "max(min(max_length, whole - kv_cache_spec.recomputed), max_length - kv_cache_spec.recomputed, 0)",
        "max_length",
        COMPANIONS,
    ),
    Fault(
        "a companion's memory is counted by a request's length",
        f"{ROOM}/core/spec.py::CompanionSpec.max_memory_usage_bytes",
        "self.blocks_per_request",
        "cdiv(vllm_config.model_config.max_model_len, self.block_size)",
        CAPACITY,
    ),
    Fault(
        "a companion's table has fewer entries than a request has blocks",
        f"{ROOM}/core/spec.py::CompanionSpec.max_num_blocks_per_req",
        "return max(self.blocks_per_request, cdiv(max_len, self.block_size))",
        "return self.blocks_per_request",
        COMPANIONS,
    ),
    Fault(
        "nothing chooses the connector that works for --kv-offloading-size",
        f"{ROOM}/plan/plan.py::apply",
        "choose_connector(vllm_config)",
        "",
        "tests/models/pool/test_offload.py -k squat2",
    ),
    # -- pages that requests share
    Fault(
        "the host's plan packs units of a hit again",
        "vllm_kvq/kernels/torch/plan.py::Planner._units",
        "= c",
        "= np.maximum(c - 1, 0)",
        TRAFFIC,
    ),
    Fault(
        "Triton packs units of a hit again",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "context /",
        "tl.maximum(context - 1, 0) /",
        "tests/triton/test_step.py -k 'random_traffic and polar4'",
    ),
    Fault(
        "CUDA packs units of a hit again",
        "csrc/cuda/pack.h",
        "= context",
        "= (context - (context > 0))",
        "tests/triton/test_step.py -k 'random_traffic and qjl3 and 32'",
        slow=True,
    ),
    Fault(
        "C++ packs every unit since the hit again in a decode step",
        "csrc/cpu/step/decode.cpp",
        "r.context /",
        "r.start /",
        TRAFFIC,
        slow=True,
    ),
    Fault(
        "a router hears of sinks",
        "vllm_kvq/integration/core/manager.py::SinkManager.cache_blocks",
        "pool.cached_block_hash_to_block.insert(full, block)",
        "pool.cached_block_hash_to_block.insert(full, block)\n            pool._emit_block_removed_events([full])",
        "tests/models/pool/test_kv_events.py -k packed_page_once",
        slow=True,
    ),
    # -- real engines
    Fault(
        "blocks that move from one kind of layers to another keep their contents, in an engine",
        f"{ROOM}/patches/served/zeroing.py::zero_all_groups.make._zero_block_ids",
        "[block_ids]",
        "[block_ids[:0]]",
        "tests/models/kinds/test_hits.py",
        slow=True,
    ),
)
