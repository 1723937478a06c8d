"""Faults in vllm_kvq/kernels, csrc and triton_kernels.

Those in C++ and CUDA are slow, because each makes a library of its own.
"""

from __future__ import annotations

from proof.mutants.fault import Fault

KERNELS, TRITON, CUDA = "tests/kernels", "tests/triton", "tests/cuda"
LARGE = f"{KERNELS}/test_large_pools.py"
GUARDS = f"{KERNELS}/test_guards.py"
LATE = f"{KERNELS}/test_late_maximum.py"
REFERENCE = f"{KERNELS}/test_reference.py -k pytorch"
INNERQ = f"{KERNELS}/test_reference.py -k 'pytorch and innerq2'"
LARGE_TRITON = f"{TRITON}/test_large_pools_triton.py -k squat2"
GUARDS_TRITON = f"{TRITON}/test_guards_triton.py"
LATE_TRITON = f"{TRITON}/test_late_maximum_triton.py"
REFERENCE_TRITON = f"{TRITON}/test_reference_triton.py"
LARGE_CUDA = f"{CUDA}/test_large_pools_cuda.py"
LATE_CUDA = f"{CUDA}/test_late_maximum_cuda.py"
PACK_CUDA = f"{CUDA}/test_cuda_emulated.py -k 'nobodys or packed_bytes'"

PLANNER = (
    Fault(
        "planner: one damaged header among sound ones is accepted",
        "vllm_kvq/kernels/torch/plan.py",
        "if stale.any():",
        "if stale.all():",
        GUARDS,
    ),
    Fault(
        "planner: a missing token is accepted",
        "vllm_kvq/kernels/torch/plan.py",
        "(rewound < 0)",
        "(rewound < -1)",
        GUARDS,
    ),
    Fault(
        "planner: one draft too many may be rejected",
        "vllm_kvq/kernels/torch/plan.py",
        "(rewound > self.num_spec)",
        "(rewound > self.num_spec + 1)",
        GUARDS,
    ),
    Fault(
        "planner: a start beyond the context is accepted",
        "vllm_kvq/kernels/torch/plan.py",
        " | (start > requests.context)",
        "",
        GUARDS,
    ),
    Fault(
        "planner: a unit is read packed that the window still covers",
        "vllm_kvq/kernels/torch/plan.py",
        "(c - fmt.W) // fmt.unit * fmt.unit",
        "(c - fmt.W + fmt.unit) // fmt.unit * fmt.unit",
        REFERENCE,
    ),
    Fault(
        "planner: units of a hit's shared pages are packed anew",
        "vllm_kvq/kernels/torch/plan.py",
        "(start + fmt.W) // p",
        "start // p",
        REFERENCE,
    ),
    Fault(
        "planner: a new token does not see itself",
        "vllm_kvq/kernels/torch/plan.py",
        "<= np.arange(queries)[None, :, None]",
        "< np.arange(queries)[None, :, None]",
        REFERENCE,
    ),
    Fault(
        "planner: the last page ends at its own size",
        "vllm_kvq/kernels/torch/plan.py",
        "np.minimum(boundary[mine[owner]] - origin, self.fmt.N)",
        "np.full_like(origin, self.fmt.N)",
        REFERENCE,
    ),
    Fault(
        "planner: packed copies of sinks are attended, too",
        "vllm_kvq/kernels/torch/plan.py",
        "np.maximum(self.fmt.S - origin, 0)",
        "np.zeros_like(origin)",
        REFERENCE,
    ),
    Fault(
        "planner: every page is begun anew",
        "vllm_kvq/kernels/torch/plan.py",
        "follows = unit // per_page * per_page < first[owner]",
        "follows = unit // per_page * per_page < 0",
        INNERQ,
    ),
    Fault(
        "slots: the ring begins in the state",
        "vllm_kvq/kernels/slots.py",
        "return 1 + self.state_slots",
        "return self.state_slots",
        REFERENCE,
    ),
    Fault(
        "slots: no block for the last few slots",
        "vllm_kvq/kernels/slots.py",
        "-(-(self.ring_at + self.ring) // self.slots_per_block)",
        "(self.ring_at + self.ring) // self.slots_per_block",
        REFERENCE,
    ),
    Fault(
        "slots: the ring has no room for drafts",
        "vllm_kvq/kernels/slots.py",
        "fmt.W + fmt.unit + num_spec",
        "fmt.W + fmt.unit - num_spec",
        REFERENCE,
    ),
)

TORCH = (
    Fault(
        "PyTorch step: another layer's plan serves whatever the headers say",
        "vllm_kvq/kernels/torch/step.py",
        "if torch.equal(known.found, headers[known.header_block]):",
        "if len(known.found) == len(known.header_block):",
        GUARDS,
    ),
    Fault(
        "PyTorch step: a chunk's tokens do not see themselves",
        "vllm_kvq/kernels/torch/step.py",
        ".tril()",
        ".tril(-1)",
        REFERENCE,
    ),
    Fault(
        "PyTorch step: a later chunk forgets the state",
        "vllm_kvq/kernels/torch/step.py",
        "before = None if fit.fresh else",
        "before = None if len(fit.state) else",
        REFERENCE,
    ),
    Fault(
        "PyTorch pack: pages keep their parameters only where all units follow",
        "vllm_kvq/kernels/torch/pack.py",
        "follows.any()",
        "follows.all()",
        INNERQ,
    ),
    Fault(
        "PyTorch gather: new tokens are counted from the last stored one",
        "vllm_kvq/kernels/torch/pack.py",
        "late = rows >= stored",
        "late = rows > stored",
        REFERENCE,
    ),
    Fault(
        "PyTorch attention: weights of the merge do not add up to one",
        "vllm_kvq/kernels/torch/attend.py",
        "    weight = weight / weight.sum(0)\n",
        "",
        f"{LATE} -k pytorch",
    ),
    Fault(
        "PyTorch attention: the maximum is left out of the log-sum-exp",
        "vllm_kvq/kernels/torch/attend.py",
        "(top + total.clamp_min(1e-30).log())",
        "total.clamp_min(1e-30).log()",
        f"{LATE} -k pytorch",
    ),
    Fault(
        "PyTorch attention: a slab that nobody sees is read as it is",
        "vllm_kvq/kernels/torch/attend.py",
        ".any(-1)[:, None, :, None], 0)",
        ".any(-1)[:, None, :, None] & False, 0)",
        f"{KERNELS}/test_cpu_attend.py -k test_the_pytorch_kernels_too",
    ),
    Fault(
        "PyTorch attention: NaN that nobody sees is multiplied by 0",
        "vllm_kvq/kernels/torch/attend.py",
        "torch.where(wanted, gather(*x, rows.clamp_min(0)), 0)",
        "gather(*x, rows.clamp_min(0))",
        f"{KERNELS}/test_cpu_raw.py -k gathered",
    ),
    Fault(
        "PyTorch attention: the slab in which a range begins may be empty",
        "vllm_kvq/kernels/torch/attend.py",
        "(slab + SLAB > low[:, None])",
        "(slab >= low[:, None])",
        f"{KERNELS}/test_cpu_step.py -k each_slab",
    ),
)

LAYOUTS = (
    Fault(
        "CPU layout: the two sketches' sizes are swapped",
        "vllm_kvq/kernels/cpu/layout.py",
        '"sketch_rows": "m",\n            "outer_rows": "m_out",',
        '"sketch_rows": "m_out",\n            "outer_rows": "m",',
        f"{KERNELS}/test_cpu_attend.py -k qjl3",
    ),
    Fault(
        "CPU layout: the paper's angles pass for fitted ones",
        "vllm_kvq/kernels/cpu/layout.py",
        '"radius_bits": "n", "paper": 1}',
        '"radius_bits": "n"}',
        f"{KERNELS}/test_cpu_attend.py -k test_option_combinations",
    ),
    Fault(
        "CPU layout: SQuat's keys are fitted to keys",
        "vllm_kvq/kernels/cpu/layout.py",
        '"gram", True, torch.float64',
        '"gram", False, torch.float64',
        f"{KERNELS}/test_cpu_pack.py -k subspace",
    ),
    Fault(
        "Triton layout: scales and zeros are swapped",
        "vllm_kvq/kernels/gpu/triton_layout.py",
        '{"K_SCALE": _halves(fmt, "k_scale"), "K_ZERO": _halves(fmt, "k_zero")}',
        '{"K_SCALE": _halves(fmt, "k_zero"), "K_ZERO": _halves(fmt, "k_scale")}',
        f"{LATE_TRITON} -k 'packed and squat2'",
    ),
    Fault(
        "Triton layout: InnerQ's values are read as per-token ones",
        "vllm_kvq/kernels/gpu/triton_layout.py",
        "HybridValues: (HYBRID_VALUES, _hybrid_values)",
        "HybridValues: (TOKEN, _hybrid_values)",
        f"{LATE_TRITON} -k 'packed and innerq2'",
    ),
    Fault(
        "Triton layout: page fields are counted from the record's first byte",
        "vllm_kvq/kernels/gpu/triton_layout.py",
        "(fmt.slabs_at - fmt.page_region.nbytes + fmt.page_region.offset(name)) // 2",
        "fmt.page_region.offset(name) // 2",
        f"{LATE_TRITON} -k 'packed and polar4'",
    ),
)

GPU = (
    Fault(
        "Triton attends at a page offset of 32 bits",
        "triton_kernels/attend.py",
        "i // turns).to(tl.int64)",
        "i // turns)",
        LARGE_TRITON,
    ),
    Fault(
        "Triton packs at a page offset of 32 bits",
        "triton_kernels/pack.py",
        "mask=due, other=0).to(tl.int64)",
        "mask=due, other=0)",
        LARGE_TRITON,
    ),
    Fault(
        "Triton finds slots at an offset of 32 bits",
        "triton_kernels/step.py",
        "mask=inside, other=0).to(tl.int64)",
        "mask=inside, other=0)",
        LARGE_TRITON,
    ),
    Fault(
        "Triton writes headers at an offset of 32 bits",
        "triton_kernels/step.py",
        "tl.load(side_table).to(tl.int64) * side_words",
        "tl.load(side_table) * side_words",
        LARGE_TRITON,
    ),
    Fault(
        "Triton serves requests with the header of other tokens",
        "triton_kernels/step.py",
        "    ok = ok & (stale == 0)\n",
        "",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton counts no stale header",
        "triton_kernels/step.py",
        "tl.atomic_add(faults_ptr, 1)",
        "tl.atomic_add(faults_ptr, 0)",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton accepts a start beyond the context",
        "triton_kernels/step.py",
        " | (start > context)",
        "",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton accepts no rejected draft",
        "triton_kernels/step.py",
        "(rewound > SPEC)",
        "(rewound >= SPEC)",
        GUARDS_TRITON,
    ),
    Fault(
        "Triton packs no unit that ends with the step",
        "triton_kernels/pack.py",
        "((unit + 1) * UNIT <= context + count)",
        "((unit + 1) * UNIT < context + count)",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton packs units of a hit's shared pages anew",
        "triton_kernels/pack.py",
        "tl.where(start > 0, (start + W) // UNIT, 0)",
        "tl.where(start > 0, start // UNIT, 0)",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton attention: no rescaling where the maximum rises by more than 16.6 bits",
        "triton_kernels/attend.py",
        "decay = tl.exp2(best - new)",
        "decay = tl.where(best - new < -16.6, 1.0, tl.exp2(best - new))",
        f"{LATE_TRITON} -k 'packed and squat2'",
    ),
    Fault(
        "Triton in full precision: no rescaling where the maximum rises by more than 16.6 bits",
        "triton_kernels/full_precision.py",
        "decay = tl.exp2(best - new)",
        "decay = tl.where(best - new < -16.6, 1.0, tl.exp2(best - new))",
        f"{LATE_TRITON} -k decode_step",
    ),
    Fault(
        "Triton in full precision: later new tokens are seen",
        "triton_kernels/full_precision.py",
        "(newer[None, :] <= own[:, None])",
        "(newer[None, :] <= own[:, None] + 1)",
        REFERENCE_TRITON,
    ),
    Fault(
        "Triton merge: parts far below the maximum weigh as much as it",
        "triton_kernels/merge.py",
        "weight = tl.exp(lse - top)",
        "weight = tl.where(lse - top < -11.5, 1.0, tl.exp(lse - top))",
        f"{LATE_TRITON} -k merge",
    ),
    Fault(
        "GPU step: units that a step completes are rounded down",
        "vllm_kvq/kernels/gpu/step.py",
        "(max(batch.lengths) + self.fmt.unit - 1) // self.fmt.unit",
        "max(batch.lengths) // self.fmt.unit",
        REFERENCE_TRITON,
    ),
    Fault(
        "GPU step: prompts begin at the first decode",
        "vllm_kvq/kernels/gpu/step.py",
        "first = sum(batch.lengths[:decodes])",
        "first = decodes",
        REFERENCE_TRITON,
    ),
    Fault(
        "GPU step: prompts of a later chunk lose the subspace",
        "vllm_kvq/kernels/gpu/step.py",
        "gram = torch.stack(grams) + state.transpose(2, 3) @ state",
        "gram = torch.stack(grams)",
        REFERENCE_TRITON,
    ),
    Fault(
        "FaultWatch raises at no stale header",
        "vllm_kvq/integration/faults.py",
        "if stale:",
        "if stale < 0:",
        f"{KERNELS}/test_fault_watch.py",
    ),
    Fault(
        "FaultWatch counts the same damage in every step",
        "vllm_kvq/integration/faults.py",
        "replaced - self.damage.total",
        "replaced",
        f"{KERNELS}/test_fault_watch.py",
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
        "return block * s.block_bytes +",
        "return int32_t(block * s.block_bytes) +",
        LARGE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cuda/attend.h",
        "decay[i] = exp2_fast(s.best[tile][i] - x);",
        "decay[i] = s.best[tile][i] - x < -16.6f ? 1.0f : exp2_fast(s.best[tile][i] - x);",
        LATE_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA packs into block 0",
        "csrc/cuda/pack.h",
        "if (page <= 0 || page >= p.count) return;",
        "if (page < 0 || page >= p.count) return;",
        PACK_CUDA,
        slow=True,
    ),
    Fault(
        "CUDA packs values before their scale is rounded",
        "csrc/cuda/pack.h",
        "to_shared(memory + SCALES_AT + 8 * i, half_to_float(positive));",
        "to_shared(memory + SCALES_AT + 8 * i, divide(high - low, 3.0f));",
        PACK_CUDA,
        slow=True,
    ),
)

CPP = (
    Fault(
        "C++ attends at a page offset of 32 bits",
        "csrc/cpu/attend/attend.cpp",
        "driver_.p_.page_ids[i] * driver_.p_.page_stride",
        "int32_t(driver_.p_.page_ids[i] * driver_.p_.page_stride)",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ finds tokens in full precision at an offset of 32 bits",
        "csrc/cpu/attend/raw.cpp",
        "(block * s[0] + slot * s[1]) * bytes",
        "int32_t((block * s[0] + slot * s[1]) * bytes)",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ packs at a page offset of 32 bits",
        "csrc/cpu/pack/pack.cpp",
        "p_.records + p_.page[i] * p_.page_stride",
        "p_.records + int32_t(p_.page[i] * p_.page_stride)",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ finds headers at an offset of 32 bits",
        "csrc/cpu/step/decode.cpp",
        "d_.side_blocks + block * d_.side_stride);",
        "d_.side_blocks + int32_t(block * d_.side_stride));",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ accepts a missing token",
        "csrc/cpu/step/decode.cpp",
        "rewound < 0 ||",
        "rewound < -1 ||",
        GUARDS,
        slow=True,
    ),
    Fault(
        "C++ merge: tasks far below the maximum weigh as much as it",
        "csrc/cpu/attend/attend.cpp",
        "total += std::exp2(top_of(i) - top) * total_of(i);",
        "total += (top_of(i) - top < -16.6f ? 1.0f : std::exp2(top_of(i) - top)) * total_of(i);",
        f"{LATE} -k 'Cpp and squat2'",
        slow=True,
    ),
    Fault(
        "C++ merge: other parts far below the maximum weigh as much as it",
        "csrc/cpu/attend/attend.cpp",
        "total += std::exp2(prior[i] - high);",
        "total += prior[i] - high < -16.6f ? 1.0f : std::exp2(prior[i] - high);",
        f"{LATE} -k cpp_merge",
        slow=True,
    ),
    Fault(
        "C++ in full precision: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cpu/attend/float32/raw.h",
        "shrink != 1.0f && c < task.d",
        "shrink > 1e-5f && c < task.d",
        f"{LATE} -k cpp_full",
        slow=True,
    ),
    Fault(
        "C++ attention in float32: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cpu/attend/float32/softmax.h",
        "if (shrink != 1.0f)",
        "if (shrink > 1e-5f)",
        f"{LATE} -k 'Cpp and packed'",
        slow=True,
    ),
)

FAULTS: tuple[Fault, ...] = (*PLANNER, *TORCH, *LAYOUTS, *GPU, *CPP)
