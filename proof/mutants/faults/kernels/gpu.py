"""Faults in the GPU's step, triton_kernels and csrc/cuda.

Those in CUDA are slow, because each builds its own library.
"""

from __future__ import annotations

from proof.mutants.fault import Fault

KERNELS = "tests/kernels"
TRITON = "tests/triton"
CUDA = "tests/cuda"
GRAPH = f"{TRITON}/test_graph.py -k 'replay and squat2-0-4'"
LARGE_TRITON = f"{TRITON}/test_large_pools_triton.py -k squat2"
GUARDS_TRITON = f"{TRITON}/test_guards_triton.py"
LATE_TRITON = f"{TRITON}/test_late_maximum_triton.py"
REFERENCE_TRITON = f"{TRITON}/test_reference_triton.py"
STEP_TRITON = f"{TRITON}/test_step.py"
LARGE_CUDA = f"{CUDA}/test_large_pools_cuda.py"
LATE_CUDA = f"{CUDA}/test_late_maximum_cuda.py"
KITTY_TRITON = f"{TRITON}/test_attend.py -k kitty2-128"
PACK_TRITON = f"{TRITON}/test_pack_tile.py"
PACK_CUDA = f"{CUDA}/test_cuda_emulated.py -k 'nobodys or packed_bytes'"

HISTORY = f"{TRITON}/test_history.py"
UNPACK = f"{TRITON}/test_unpack.py"
SHARING_TRITON = f"{TRITON}/test_reference_triton.py -k 'sharing and other'"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "GPU: the ring is overwritten before sharing layers have read it",
        "vllm_kvq/kernels/gpu/step.py::GPUStep.run",
        "not caches.readers",
        "batch.requests",
        SHARING_TRITON,
    ),
    Fault(
        "GPU: new tokens are not kept where layers share the caches",
        "vllm_kvq/kernels/gpu/step.py::GPUStep.share",
        "last:",
        "not last and last:",
        SHARING_TRITON,
    ),
    Fault(
        "GPU: sharing layers attend keys in memory that vLLM uses again",
        "vllm_kvq/kernels/gpu/step.py::GPUStep.run",
        ".clone(), value.clone()",
        ", value",
        SHARING_TRITON,
    ),
    Fault(
        "GPU step: a history that was unpacked is attended again by pages",
        "vllm_kvq/kernels/gpu/history.py::History.of",
        "0",
        "high",
        f"{HISTORY} -k chunks",
    ),
    Fault(
        "GPU step: an unpacked history begins with its page, not behind the sinks",
        "vllm_kvq/kernels/gpu/history.py::attend",
        "max(0, span.low - at * fmt.N)",
        "0",
        f"{HISTORY} -k chunks",
    ),
    Fault(
        "GPU step: pages that were never packed are unpacked",
        "vllm_kvq/kernels/gpu/history.py::History.of",
        "if is_sound",
        "",
        f"{HISTORY} -k not_unpacked",
    ),
    Fault(
        "GPU step: damaged pages of an unpacked history are not counted",
        "triton_kernels/unpack.py::unpack_kernel",
        "1,",
        "0,",
        f"{HISTORY} -k damaged",
    ),
    Fault(
        "Triton unpacks what was never packed",
        "triton_kernels/unpack.py::unpack_kernel",
        "< tl.where(live, R.d, 0)",
        "< R.d",
        f"{UNPACK} -k not_packed",
    ),
    Fault(
        "Triton unpacks the high digits of Kitty's keys by channel",
        "triton_kernels/unpack.py::_channel_keys",
        "rank,",
        "channel % K.boosted,",
        f"{UNPACK} -k 'codecs and kitty2'",
    ),
    Fault(
        "Triton unpacks InnerQ's symmetric groups without their signs",
        "triton_kernels/unpack.py::_hybrid",
        "tl.where(symmetric, (sign - 1) * (1 << BITS), 0)",
        "0 * sign",
        f"{UNPACK} -k 'codecs and innerq2'",
    ),
    Fault(
        "Triton attends at a page offset of 32 bits",
        "triton_kernels/attend.py::attend_kernel",
        "i // turns).to(tl.int64)",
        "i // turns)",
        LARGE_TRITON,
    ),
    Fault(
        "Triton packs at a page offset of 32 bits",
        "triton_kernels/packing/kernel.py::pack_kernel",
        ".to(tl.int64)",
        "",
        LARGE_TRITON,
    ),
    Fault(
        "Triton finds slots at an offset of 32 bits",
        "triton_kernels/step.py::slot_offset",
        ".to(tl.int64)",
        "",
        LARGE_TRITON,
    ),
    Fault(
        "Triton writes headers at an offset of 32 bits",
        "triton_kernels/step.py::commit_kernel",
        "(side_table).to(tl.int64)",
        "(side_table)",
        LARGE_TRITON,
    ),
    Fault(
        "Triton writes headers into slot 0 wherever they belong",
        "triton_kernels/step.py::commit_kernel",
        "side_words + C.header",
        "side_words",
        f"{TRITON}/test_step.py -k 'random_traffic and (qjl3 or polar4)'",
    ),
    Fault(
        "the host packs as many units as the lengths that it reads call for",
        "vllm_kvq/kernels/gpu/step.py::GPUStep._pack",
        "units = (max(batch.lengths) + self.fmt.unit - 1) // self.fmt.unit",
        "units = -(-int(batch.seq_lens.max()) // self.fmt.unit)",
        GRAPH,
    ),
    Fault(
        "Triton serves requests with the header of other tokens",
        "triton_kernels/step.py::begin_kernel",
        "ok = ok & (stale == 0)",
        "",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton counts no stale header",
        "triton_kernels/step.py::begin_kernel",
        ", 1",
        ", 0",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton accepts a start beyond the context",
        "triton_kernels/step.py::begin_kernel",
        "| (start > context)",
        "",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton accepts no rejected draft",
        "triton_kernels/step.py::begin_kernel",
        "> SPEC",
        ">= SPEC",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton packs no unit that ends with the step",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "<=",
        "<",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton packs units of a hit's shared pages again",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "context /",
        "tl.maximum(context - 1, 0) /",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton attention: no rescaling where the maximum rises by more than 16.6 bits",
        "triton_kernels/attend.py::attend_kernel",
        "exp2(best - new)",
        "where(best - new < -16.6, 1.0, tl.exp2(best - new))",
        f"{LATE_TRITON} -k 'packed and squat2'",
    ),
    Fault(
        "Triton in full precision: no rescaling where the maximum rises by more than 16.6 bits",
        "triton_kernels/full_precision.py::full_precision_kernel",
        "exp2(best - new)",
        "where(best - new < -16.6, 1.0, tl.exp2(best - new))",
        f"{LATE_TRITON} -k decode_step",
    ),
    Fault(
        "Triton in full precision: no soft cap of scores",
        "triton_kernels/full_precision.py::full_precision_kernel",
        "if CAPPED:",
        "if CAPPED and False:",
        "tests/triton/test_reference_triton.py -k cap",
    ),
    Fault(
        "Triton in full precision: later new tokens are seen",
        "triton_kernels/full_precision.py::full_precision_kernel",
        "own[:, None]",
        "own[:, None] + 1",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton merge: parts far below the maximum weigh as much as it",
        "triton_kernels/merge.py::merge_kernel",
        "exp(lse - top)",
        "where(lse - top < -11.5, 1.0, tl.exp(lse - top))",
        f"{LATE_TRITON} -k merge",
    ),
    Fault(
        "Triton takes the boosted channels of another slab",
        "triton_kernels/keys/boosted.py::boosted_scores",
        "s * R.slab_words * 2 +",
        "",
        KITTY_TRITON,
    ),
    Fault(
        "Triton's high digits count as much as low ones",
        "triton_kernels/attend.py::attend_kernel",
        "4.",
        "1.",
        KITTY_TRITON,
    ),
    Fault(
        "Triton multiplies by a boosted channel's sign",
        "triton_kernels/keys/channel.py::channel_scores",
        "tl.abs(scale)",
        "scale + 0.0",
        KITTY_TRITON,
    ),
    Fault(
        "Triton leaves values rotated",
        "triton_kernels/attend.py::attend_kernel",
        "blocks = rotated_back(blocks, V.rotated, V.block, R.d)",
        "blocks = blocks + ()",
        KITTY_TRITON,
    ),
    Fault(
        "Triton packs high digits a place too far",
        "triton_kernels/packing/tile.py::boosted_keys",
        "(wide) - 1",
        "(wide)",
        f"{PACK_TRITON} -k codecs",
    ),
    Fault(
        "Triton boosts all channels that are as wide as the last one",
        "triton_kernels/packing/tile.py::_largest",
        "above | (equal & (_number(equal) <= COUNT - _count(above)))",
        "above | equal",
        f"{PACK_TRITON} -k equally",
    ),
    Fault(
        "Triton fits scales in one round",
        "triton_kernels/packing/fitted.py::fitted_parameters",
        "(3)",
        "(1)",
        f"{PACK_TRITON} -k codecs",
    ),
    Fault(
        "Triton does not count what it replaces of Kitty's keys",
        "triton_kernels/packing/kernel.py::pack_kernel",
        "boosted_keys",
        "0 * boosted_keys",
        f"{PACK_TRITON} -k counted",
    ),
    Fault(
        "GPU step: units that a step completes are rounded down",
        "vllm_kvq/kernels/gpu/step.py::GPUStep._pack",
        "(max(batch.lengths) + self.fmt.unit - 1)",
        "max(batch.lengths)",
        REFERENCE_TRITON,
    ),
    Fault(
        "GPU step: prompts begin at the first decode",
        "vllm_kvq/kernels/gpu/step.py::GPUStep._new_tokens",
        "sum(batch.lengths[:decodes])",
        "decodes",
        REFERENCE_TRITON,
    ),
    Fault(
        "GPU step: prompts of a later chunk lose the subspace",
        "vllm_kvq/kernels/gpu/step.py::GPUStep._fit",
        "torch.where((alive & ~fresh)[:, None], before, 0)",
        "torch.zeros_like(before)",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton packs SQuat's keys without the floor",
        "triton_kernels/packing/keys.py::pull",
        "tl.maximum(noise * K.floor, 1.0 / K.lam)",
        "0 * noise + 1.0 / K.lam",
        f"{STEP_TRITON} -k reference_cache",
    ),
    Fault(
        "Triton spreads the noise over a head's padding",
        "triton_kernels/step.py::_subspace",
        "R.head -",
        "R.d -",
        f"{STEP_TRITON} -k noise",
    ),
    Fault(
        "Triton finds a state in elements of the cache's dtype",
        "triton_kernels/step.py::state_offset",
        "C, C.words",
        "C, C.slot",
        f"{PACK_TRITON} -k corrected_as",
    ),
    Fault(
        "Triton stores corrected keys of any size",
        "triton_kernels/packing/keys.py::channel_keys",
        'clean(x - tl.dot(z, u, input_precision="ieee"))',
        'x - tl.dot(z, u, input_precision="ieee")',
        f"{STEP_TRITON} -k 'float16 and plain'",
    ),
    Fault(
        "Triton stores corrected keys with boosted channels of any size",
        "triton_kernels/packing/tile.py::boosted_keys",
        'clean(x - tl.dot(tl.dot(z, m, input_precision="ieee"), u, input_precision="ieee"))',
        'x - tl.dot(tl.dot(z, m, input_precision="ieee"), u, input_precision="ieee")',
        f"{STEP_TRITON} -k 'float16 and boosted'",
    ),
    Fault(
        "FaultWatch raises at no stale header",
        "vllm_kvq/integration/worker/faults.py::FaultWatch._judge",
        "stale:",
        "stale < 0:",
        f"{KERNELS}/test_fault_watch.py",
    ),
    Fault(
        "FaultWatch counts the same damage in every step",
        "vllm_kvq/integration/worker/faults.py::FaultWatch._judge",
        "- self.damage.total",
        "",
        f"{KERNELS}/test_fault_watch.py",
    ),
    Fault(
        "CUDA: the members of a tuple are not compared",
        "vllm_kvq/kernels/gpu/cuda.py::checked",
        "if str(theirs).split() != ours",
        "if False",
        "tests/cuda/test_cuda_emulated.py -k only_one_side",
    ),
    Fault(
        "CUDA attends at a page offset of 32 bits",
        "csrc/cuda/read.h",
        "id * pages.page_stride +",
        "int32_t(id * pages.page_stride) +",
        LARGE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA packs at a page offset of 32 bits",
        "csrc/cuda/pack.h",
        "page * p.page_stride +",
        "int32_t(page * p.page_stride) +",
        LARGE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA finds slots at an offset of 32 bits",
        "csrc/cuda/pack.h",
        "block * s.block_bytes",
        "int32_t(block * s.block_bytes)",
        LARGE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cuda/attend.h",
        "decay[i] =",
        "decay[i] = s.best[tile][i] - x < -16.6f ? 1.0f :",
        LATE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA packs into block 0",
        "csrc/cuda/pack.h",
        "page <=",
        "page <",
        PACK_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA packs values before their scale is rounded",
        "csrc/cuda/pack.h",
        "half_to_float(positive)",
        "divide(high - low, 3.0f)",
        PACK_CUDA,
        slow=True,
    ),
)
