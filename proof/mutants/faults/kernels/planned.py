"""Faults in the planner, the PyTorch kernels, and in what kernels are told of a format's layout."""

from __future__ import annotations

from proof.mutants.fault import Fault

KERNELS = "tests/kernels"
TRITON = "tests/triton"
GUARDS = f"{KERNELS}/step/test_guards.py"
LATE = f"{KERNELS}/step/test_late_maximum.py"
REFERENCE = f"{KERNELS}/step/test_reference.py -k pytorch"
SLOTS = f"{KERNELS}/step/test_slots.py"
INNERQ = f"{KERNELS}/step/test_reference.py -k 'pytorch and innerq2'"
LATE_TRITON = f"{TRITON}/test_late_maximum_triton.py"

SINKS = f"{KERNELS}/step/test_reference.py -k learned_sinks"
SHARING = f"{KERNELS}/step/test_reference.py -k 'sharing and squat2'"

PLANNER = (
    Fault(
        "sharing layers attend keys in memory that vLLM uses again",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.run",
        ".clone(), value.clone()",
        ", value",
        SHARING,
    ),
    Fault(
        "sharing layers read a chunk's history after it was overwritten",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.run",
        "ring, key",
        "self.slots.cut(caches.sidecar)[plan.ring_read], key",
        SHARING,
    ),
    Fault(
        "what sharing layers attend is kept too long",
        "vllm_kvq/kernels/step.py::Caches.read",
        "self.shared = None",
        "",
        SHARING,
    ),
    Fault(
        "C++ plans for layers that share the caches of a decode step",
        "vllm_kvq/kernels/cpu/step.py::CPUStep.share",
        "self.decode(batch, caches, query, None, None, output)",
        "self.planned.share(batch, caches, query, output)",
        SHARING,
    ),
    Fault(
        "planner: what prompts complete counts as decoded",
        "vllm_kvq/kernels/torch/plan.py::Planner._units",
        "~",
        "",
        "tests/instruments/test_option_properties.py -k decode_step",
    ),
    Fault(
        "planner: one damaged header among sound ones is accepted",
        "vllm_kvq/kernels/torch/plan.py::Planner._check",
        "any",
        "all",
        GUARDS,
    ),
    Fault(
        "planner: a missing token is accepted",
        "vllm_kvq/kernels/torch/plan.py::Planner._check",
        "(rewound < 0)",
        "(rewound < -1)",
        GUARDS,
    ),
    Fault(
        "planner: one draft too many may be rejected",
        "vllm_kvq/kernels/torch/plan.py::Planner._check",
        "num_spec",
        "num_spec + 1",
        GUARDS,
    ),
    Fault(
        "planner: a start beyond the context is accepted",
        "vllm_kvq/kernels/torch/plan.py::Planner._check",
        "| (start > requests.context)",
        "",
        GUARDS,
    ),
    Fault(
        "planner: a unit is read packed that the window still covers",
        "vllm_kvq/kernels/torch/plan.py::Planner.plan",
        "- fmt.W",
        "- fmt.W + fmt.unit",
        REFERENCE,
    ),
    Fault(
        "planner: units of a hit's shared pages are packed again",
        "vllm_kvq/kernels/torch/plan.py::Planner._units",
        "= c",
        "= np.maximum(c - 1, 0)",
        REFERENCE,
    ),
    Fault(
        "planner: a new token does not see itself",
        "vllm_kvq/kernels/torch/plan.py::Planner._held",
        "<=",
        "<",
        REFERENCE,
    ),
    Fault(
        "planner: the last page ends at its own size",
        "vllm_kvq/kernels/torch/plan.py::Planner._groups",
        "np.minimum(boundary[mine[owner]] - origin, self.fmt.N)",
        "np.full_like(origin, self.fmt.N)",
        REFERENCE,
    ),
    Fault(
        "planner: packed copies of sinks are attended, too",
        "vllm_kvq/kernels/torch/plan.py::Planner._groups",
        "np.maximum(self.fmt.S - origin, 0)",
        "np.zeros_like(origin)",
        REFERENCE,
    ),
    Fault(
        "planner: every page is started again",
        "vllm_kvq/kernels/torch/plan.py::Planner._units",
        "first[owner]",
        "0",
        INNERQ,
    ),
    Fault(
        "slots: the ring begins in the state",
        "vllm_kvq/kernels/slots.py::SlotGeometry.ring_at",
        "self.state_at + self.state_slots",
        "self.state_at",
        REFERENCE,
    ),
    Fault(
        "slots: the header begins in its block and ends behind it",
        "vllm_kvq/kernels/slots.py::SlotGeometry.header_at",
        "behind + HEADER_BYTES <= self.page_bytes",
        "behind < self.page_bytes",
        SLOTS,
    ),
    Fault(
        "slots: a header takes a slot though there is room behind",
        "vllm_kvq/kernels/slots.py::SlotGeometry.state_at",
        "0 if self.header_at else 1",
        "1",
        SLOTS,
    ),
    Fault(
        "slots: no block for the last few slots",
        "vllm_kvq/kernels/slots.py::SlotGeometry.sidecar_blocks",
        "-(-(self.ring_at + self.ring) // self.slots_per_block)",
        "(self.ring_at + self.ring) // self.slots_per_block",
        REFERENCE,
    ),
    Fault(
        "slots: the ring has no room for drafts",
        "vllm_kvq/kernels/slots.py::SlotGeometry.of",
        "unit +",
        "unit -",
        REFERENCE,
    ),
)

POSITIONS = tuple(
    Fault(name, f"vllm_kvq/kernels/torch/{where}", before, after, f"{KERNELS}/step/test_reference.py -k klt2")
    for name, where, before, after in (
        ("a unit's position is its number", "plan.py::Planner._units", "self._long(unit * p),", "self._long(unit),"),
        (
            "a page's first unit begins every unit",
            "plan.py::Planner._units",
            "self._long(unit * p),",
            "self._long(unit // per_page * fmt.N),",
        ),
    )
)
TORCH = (
    Fault(
        "PyTorch step: another layer's plan serves whatever the headers say",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.plan",
        "torch.equal(known.found, headers[known.header_block]):",
        "len(known.found) == len(known.header_block):",
        GUARDS,
    ),
    Fault(
        "PyTorch step: a plan serves layers whose companions are cut otherwise",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.plan",
        "if slots == self.slots and",
        "if",
        "tests/engine/oracle/test_by_layer.py -k rank",
        slow=True,
    ),
    Fault(
        "PyTorch step: a chunk's tokens do not see themselves",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.attend",
        ".tril()",
        ".tril(-1)",
        REFERENCE,
    ),
    Fault(
        "PyTorch step: a later chunk forgets the state",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.fit",
        "fit.fresh",
        "len(fit.state)",
        REFERENCE,
    ),
    Fault(
        "PyTorch pack: pages keep their parameters only where all units follow",
        "vllm_kvq/kernels/torch/pack.py::pack",
        "any",
        "all",
        INNERQ,
    ),
    Fault(
        "PyTorch gather: new tokens are counted from the last stored one",
        "vllm_kvq/kernels/torch/pack.py::gather",
        ">=",
        ">",
        REFERENCE,
    ),
    Fault(
        "PyTorch attention: weights of the merge do not add up to one",
        "vllm_kvq/kernels/torch/attend.py::merge",
        "weight = weight / weight.sum(0)",
        "",
        f"{LATE} -k pytorch",
    ),
    Fault(
        "PyTorch attention: the maximum is left out of the log-sum-exp",
        "vllm_kvq/kernels/torch/attend.py::softmax_part",
        "(top + total.clamp_min(1e-30).log())",
        "total.clamp_min(1e-30).log()",
        f"{LATE} -k pytorch",
    ),
    Fault(
        "PyTorch attention: a slab that nobody sees is read as it is",
        "vllm_kvq/kernels/torch/attend.py::_unpack",
        "[:, None, :, None]",
        "[:, None, :, None] & False",
        f"{KERNELS}/cpu/test_cpu_attend.py -k test_the_pytorch_kernels_too",
    ),
    Fault(
        "PyTorch attention: NaN that nobody sees is multiplied by 0",
        "vllm_kvq/kernels/torch/attend.py::attend_into",
        "torch.where(wanted, gather(*x, rows.clamp_min(0)), 0)",
        "gather(*x, rows.clamp_min(0))",
        f"{KERNELS}/cpu/test_cpu_raw.py -k gathered",
    ),
    Fault(
        "PyTorch attention: the slab in which a range begins may be empty",
        "vllm_kvq/kernels/torch/attend.py::all_packed",
        "+ SLAB >",
        ">=",
        f"{KERNELS}/cpu/test_cpu_step.py -k each_slab",
    ),
)

LAYOUTS = (
    Fault(
        "Triton layout: InnerQ's keys always take the better mode",
        "vllm_kvq/kernels/gpu/triton/codecs.py::_hybrid_pack",
        "k.mode",
        "0",
        "tests/instruments/test_option_properties.py -k gpus",
    ),
    Fault(
        "Triton layout: InnerQ's keys always have a norm",
        "vllm_kvq/kernels/gpu/triton/codecs.py::_hybrid_pack",
        "bool(k.state_rows)",
        "True",
        "tests/instruments/test_option_properties.py -k gpus",
    ),
    Fault(
        "CPU layout: the two sketches' sizes are swapped",
        "vllm_kvq/kernels/cpu/layout.py",
        '"sketch_rows": "m",\n            "outer_rows": "m_out",',
        '"sketch_rows": "m_out",\n            "outer_rows": "m",',
        f"{KERNELS}/cpu/test_cpu_attend.py -k qjl3",
    ),
    Fault(
        "CPU layout: the paper's angles pass for fitted ones",
        "vllm_kvq/kernels/cpu/layout.py",
        ', "paper": 1',
        "",
        f"{KERNELS}/cpu/test_cpu_attend.py -k test_option_combinations",
    ),
    Fault(
        "CPU layout: SQuat's keys are fitted to keys",
        "vllm_kvq/kernels/cpu/layout.py",
        "True,",
        "False,",
        f"{KERNELS}/cpu/test_cpu_pack.py -k subspace",
    ),
    Fault(
        "CPU layout: numbers that both sides say are not compared",
        "vllm_kvq/kernels/cpu/layout.py::Names.__post_init__",
        "if self.numbers != (",
        "if False and self.numbers != (",
        "tests/kernels/cpu/test_cpu_layout.py -k names_that",
    ),
    Fault(
        "CPU layout: the tensors of a tuple are not compared",
        "vllm_kvq/kernels/cpu/layout.py::Names.__post_init__",
        "if self.tuples != (",
        "if False and self.tuples != (",
        "tests/kernels/cpu/test_cpu_layout.py -k names_that",
    ),
    Fault(
        "Triton layout: scales and zeros are swapped",
        "vllm_kvq/kernels/gpu/triton/codecs.py::_per_channel",
        '(fmt, "k_scale"), "zero": halves(fmt, "k_zero")',
        '(fmt, "k_zero"), "zero": halves(fmt, "k_scale")',
        f"{LATE_TRITON} -k 'packed and squat2'",
    ),
    Fault(
        "Triton layout: InnerQ's values are read as per-token ones",
        "vllm_kvq/kernels/gpu/triton/codecs.py",
        "HYBRID_VALUES, _hybrid_values",
        "TOKEN, _hybrid_values",
        f"{LATE_TRITON} -k 'packed and innerq2'",
    ),
    Fault(
        "Triton layout: page fields are counted from the record's first byte",
        "vllm_kvq/kernels/gpu/triton/codecs.py::_page_halves",
        "(fmt.slabs_at - fmt.page_region.nbytes + fmt.page_region.offset(name)) // 2",
        "fmt.page_region.offset(name) // 2",
        f"{LATE_TRITON} -k 'packed and polar4'",
    ),
)

LEARNED = (
    Fault(
        "PyTorch's merge drops the learned sink",
        "vllm_kvq/kernels/torch/attend.py::with_learned",
        "total = torch.logaddexp(lse, learned.float())",
        "total = lse",
        SINKS,
    ),
    Fault(
        "steps that are planned drop the learned sink",
        "vllm_kvq/kernels/torch/step.py::PlannedStep.attend",
        "parts.append(with_learned(parts.pop() if parts else nothing, caches.learned))",
        "parts.append(parts.pop() if parts else nothing)",
        SINKS,
    ),
    Fault(
        "a prompt's own tokens are attended without the learned sink",
        "vllm_kvq/kernels/torch/step.py::PlannedStep._prompts",
        "out, _ = with_learned((out, lse), learned)",
        "pass",
        "tests/models/test_works.py -k gpt-oss",
        slow=True,
    ),
    Fault(
        "C++ decodes layers with learned sinks, of which it knows nothing",
        "vllm_kvq/kernels/cpu/step.py::CPUStep.run",
        "and caches.learned is None",
        "",
        SINKS,
    ),
    Fault(
        "the GPU's merge drops the learned sink",
        "vllm_kvq/kernels/gpu/step.py::GPUStep._attend",
        "caches.learned.float()",
        "-torch.inf",
        f"{TRITON}/test_reference_triton.py -k learned",
    ),
)

FAULTS: tuple[Fault, ...] = (*PLANNER, *POSITIONS, *TORCH, *LAYOUTS, *LEARNED)
