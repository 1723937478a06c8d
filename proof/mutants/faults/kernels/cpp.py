"""Faults in csrc/cpu: slow, because each builds its own library."""

from __future__ import annotations

from proof.mutants.fault import Fault

KERNELS = "tests/kernels"
LARGE = f"{KERNELS}/step/test_large_pools.py"
GUARDS = f"{KERNELS}/step/test_guards.py"
NO_MEMORY = f"{KERNELS}/cpu/test_no_memory.py"
LATE = f"{KERNELS}/step/test_late_maximum.py"
SQUAT = f"{KERNELS}/cpu/test_cpu_pack.py -k squat"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "C++ attends at a page offset of 32 bits",
        "csrc/cpu/attend/attend.cpp",
        "driver_.list_.ids[i] * pool.page_stride",
        "int32_t(driver_.list_.ids[i] * pool.page_stride)",
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
        "units_.page[i] * p_.pool.page_stride",
        "int32_t(units_.page[i] * p_.pool.page_stride)",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ does not tell where a page is",
        "csrc/cpu/pack/pack.cpp",
        "int32_t(u.position - units_.unit[i] * tokens)",
        "0",
        f"{KERNELS}/cpu/test_cpu_pack.py -k klt",
        slow=True,
    ),
    Fault(
        "C++: units that decode steps complete are all at the beginning",
        "csrc/cpu/step/decode.cpp",
        "position_.push_back(u * p)",
        "position_.push_back(0)",
        f"{KERNELS}/cpu/test_cpu_decode.py -k klt",
        slow=True,
    ),
    Fault(
        "C++: means turn within the first slabs only",
        "csrc/cpu/pack/kinds/turning.h",
        "n / kvq::FINE % kvq::COARSE",
        "0 * n",
        f"{KERNELS}/cpu/test_cpu_attend.py -k klt",
        slow=True,
    ),
    Fault(
        "C++: a page's slabs have the mean of its first",
        "csrc/cpu/pack/kinds/turning.h",
        "uint32_t(nth) * kvq::SLAB",
        "0 * uint32_t(nth)",
        f"{KERNELS}/cpu/test_cpu_attend.py -k klt",
        slow=True,
    ),
    Fault(
        "C++ packs SQuat's keys without the floor",
        "csrc/cpu/pack/pack.cpp",
        "std::max(1 / l_.lambda, l_.noise_floor * noise)",
        "0 * noise + 1 / l_.lambda",
        SQUAT,
        slow=True,
    ),
    Fault(
        "C++ takes the better mode of InnerQ's groups, whatever is asked for",
        "csrc/cpu/pack/kinds/hybrid.h",
        "? Ints",
        "> 9 ? Ints",
        f"{KERNELS}/cpu/test_cpu_pack.py -k innerq",
        slow=True,
    ),
    Fault(
        "C++ stores corrected keys of any size",
        "csrc/cpu/pack/kinds/affine.h",
        "max(min(moved, splat(LIMIT)), splat(-LIMIT))",
        "moved",
        SQUAT,
        slow=True,
    ),
    Fault(
        "C++ finds headers at an offset of 32 bits",
        "csrc/cpu/step/decode.cpp",
        "block * d_.side_stride",
        "int32_t(block * d_.side_stride)",
        LARGE,
        slow=True,
    ),
    Fault(
        "C++ accepts a missing token",
        "csrc/cpu/step/decode.cpp",
        "rewound < 0",
        "rewound < -1",
        GUARDS,
        slow=True,
    ),
    Fault(
        "C++ merge: tasks far below the maximum weigh as much as it",
        "csrc/cpu/attend/attend.cpp",
        "std::exp2(top_of(i) - top)",
        "(top_of(i) - top < -16.6f ? 1.0f : std::exp2(top_of(i) - top))",
        f"{LATE} -k 'Cpp and squat2'",
        slow=True,
    ),
    Fault(
        "C++ merge: other parts far below the maximum weigh as much as it",
        "csrc/cpu/attend/attend.cpp",
        "std::exp2(prior[i] - high);",
        "prior[i] - high < -16.6f ? 1.0f : std::exp2(prior[i] - high);",
        f"{LATE} -k cpp_merge",
        slow=True,
    ),
    Fault(
        "C++ in full precision: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cpu/attend/float32/raw.h",
        "!= 1.0f",
        "> 1e-5f",
        f"{LATE} -k cpp_full",
        slow=True,
    ),
    Fault(
        "C++ attention in float32: no rescaling where the maximum rises by more than 16.6 bits",
        "csrc/cpu/attend/float32/softmax.h",
        "!= 1.0f",
        "> 1e-5f",
        f"{LATE} -k 'Cpp and packed'",
        slow=True,
    ),
    Fault(
        "C++ computes in memory that it did not get",
        "csrc/cpu/scratch.h",
        "if (data_ == nullptr) throw std::bad_alloc();",
        "",
        NO_MEMORY,
        slow=True,
    ),
    Fault(
        "C++: what a thread throws is lost",
        "csrc/cpu/threads.h",
        "if (loop.error) std::rethrow_exception(loop.error);",
        "",
        NO_MEMORY,
        slow=True,
    ),
    Fault(
        "C++: no soft cap of the scores of packed tokens",
        "csrc/cpu/attend/attend.cpp",
        "cap > 0",
        "cap > 1e30f",
        f"{KERNELS}/cpu/test_cpu_attend.py -k cap",
        slow=True,
    ),
    Fault(
        "C++: no soft cap of the scores of full-precision tokens",
        "csrc/cpu/attend/float32/raw.h",
        "> 0",
        "> 1e30f",
        f"{KERNELS}/cpu/test_cpu_raw.py -k cap",
        slow=True,
    ),
    Fault(
        "C++: no soft cap in a decode step of one call",
        "csrc/cpu/step/decode.cpp",
        "a.scores = d_.scores;",
        "a.scores = {d_.scores.scale, 0};",
        f"{KERNELS}/step/test_reference.py -k cap",
        slow=True,
    ),
)
