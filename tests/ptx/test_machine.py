"""The machine that runs PTX: what it computes and what it refuses. The kernels here are written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from proof.ptx.grid import launch
from proof.ptx.instructions.wgmma import places
from proof.ptx.memory import Fault, Tensors
from proof.ptx.parser import parse
from proof.ptx.program import Unsupported
from proof.ptx.translate import translate

HEAD = """
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry k(.param .u64 .ptr .global .align 1 out, .param .u32 n)
.reqntid {threads}
{{
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %d<16>;
    ld.param.b64 %d0, [out];
    ld.param.b32 %r0, [n];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;           // a word of shared memory for each thread
    cvt.u64.u32 %d1, %r3;
    add.s64 %d2, %d0, %d1;           // and of the tensor
{body}
    ret;
}}
"""


def run(body: str, out: np.ndarray, n: int = 0, threads: int = 64, shared: int = 1024) -> np.ndarray:
    program = parse(HEAD.format(threads=threads, body=body))
    params = np.zeros(program.param_bytes, np.uint8)
    params[:8] = np.array([out.ctypes.data], np.uint64).view(np.uint8)
    params[8:12] = np.array([n], np.uint32).view(np.uint8)
    launch(program, translate(program), (1, 1, 1), threads, shared, params, Tensors([(out.ctypes.data, out.nbytes)]))
    return out


def words(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.uint32)


WRITE = "st.shared.b32 [%r4], %r1;"
NEIGHBOUR = "xor.b32 %r5, %r4, {distance}; ld.shared.b32 %r6, [%r5]; st.global.b32 [%d2], %r6;"


def test_a_barrier_lets_threads_exchange() -> None:
    got = run(f"{WRITE} bar.sync 0; {NEIGHBOUR.format(distance=128)}", words())
    assert (got == (np.arange(64) ^ 32)).all()


@pytest.mark.parametrize(
    ("barrier", "distance"),
    [("", 128), ("", 4), ("bar.warp.sync -1;", 128)],
    ids=["none between warps", "none in a warp", "a warp's between warps"],
)
def test_a_missing_barrier_is_a_race(barrier: str, distance: int) -> None:
    with pytest.raises(Fault, match=r"a race: shared memory is read .* \[ld\.shared\.b32"):
        run(f"{WRITE} {barrier} {NEIGHBOUR.format(distance=distance)}", words())


def test_a_warps_barrier_orders_the_warp() -> None:
    got = run(f"{WRITE} bar.warp.sync -1; {NEIGHBOUR.format(distance=4)} bar.warp.sync -1; {WRITE}", words())
    assert (got == (np.arange(64) ^ 1)).all()


def test_what_was_read_may_not_be_overwritten_at_once() -> None:
    read = f"{WRITE} bar.sync 0; {NEIGHBOUR.format(distance=4)}"
    with pytest.raises(Fault, match="written that another thread has read"):
        run(f"{read} add.s32 %r7, %r1, 1; st.shared.b32 [%r4], %r7;", words())
    run(f"{read} bar.sync 0; add.s32 %r7, %r1, 1; st.shared.b32 [%r4], %r7;", words())


def test_copies_of_one_value_may_be_written_by_all_but_not_of_two() -> None:
    run("st.shared.b32 [%r2], 7;", words())
    with pytest.raises(Fault, match="different values"):
        run("st.shared.b32 [%r2], %r1;", words())


def test_nothing_outside_the_tensors_is_touched() -> None:
    with pytest.raises(Fault, match="1 of 64 accesses of 4 bytes lie outside all tensors"):
        run("ld.global.b32 %r5, [%d2+4];", words())
    with pytest.raises(Fault, match="2 of 64 accesses of 8 bytes lie outside"):
        run("add.s64 %d3, %d2, %d1; st.global.b64 [%d3], %d0;", words(124))
    with pytest.raises(Fault, match="2 of 64 accesses of 8 bytes lie outside"):  # one of them by half
        run("add.s64 %d3, %d2, %d1; st.global.b64 [%d3], %d0;", words(125))
    with pytest.raises(Fault, match="shared memory has 252 bytes"):
        run(WRITE, words(), shared=252)


def test_a_guard_keeps_threads_from_touching() -> None:
    got = run("setp.lt.s32 %p1, %r1, 63; @%p1 st.global.b32 [%d2+4], %r1;", words())
    assert (got[1:] == np.arange(63)).all()
    assert got[0] == 0


def test_misaligned_accesses_fail() -> None:
    with pytest.raises(Fault, match="misaligned"):
        run("ld.global.b64 %d3, [%d2];", words(66))
    with pytest.raises(Fault, match="misaligned"):
        run("ld.shared.v2.b32 {%r5, %r6}, [%r4];", words())


def test_all_threads_must_reach_a_barrier_and_a_warp_its_shuffle() -> None:
    half = "setp.lt.s32 %p1, %r1, {first}; @%p1 bra END; {what} END:"
    with pytest.raises(Fault, match="only 32 of 64 threads reach a barrier"):
        run(half.format(first=32, what="bar.sync 0;"), words())
    shuffle = "shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; st.global.b32 [%d2], %r5;"
    with pytest.raises(Fault, match="a part of a warp"):
        run(half.format(first=16, what=shuffle), words())
    got = run(half.format(first=32, what=shuffle), words())
    assert (got[32:] == (np.arange(32, 64) ^ 1)).all()


def test_threads_part_and_meet_again() -> None:
    """Each counts to its number in a loop, odd ones in steps of two, and all meet at a barrier."""
    body = """
    mov.b32 %r5, 0; mov.b32 %r6, 0; and.b32 %r7, %r1, 1; setp.ne.s32 %p1, %r7, 0;
LOOP:
    setp.ge.s32 %p2, %r5, %r1; @%p2 bra DONE;
    @%p1 bra ODD;
    add.s32 %r5, %r5, 1; bra.uni NEXT;
ODD:
    add.s32 %r5, %r5, 2;
NEXT:
    add.s32 %r6, %r6, 1; bra LOOP;
DONE:
    bar.sync 0; st.global.b32 [%d2], %r6;"""
    lane = np.arange(64)
    assert (run(body, words()) == np.where(lane % 2, lane // 2 + 1, lane)).all()


def test_an_asynchronous_copy_arrives_when_it_is_waited_for() -> None:
    copy = "cp.async.ca.shared.global [%r4], [%d2], 4; cp.async.commit_group; {wait} ld.shared.b32 %r5, [%r4]; "
    store = "add.s32 %r5, %r5, 1; st.global.b32 [%d2], %r5;"
    start = np.arange(100, 164, dtype=np.uint32)
    assert (run(copy.format(wait="") + store, start.copy()) == 0).all()  # -1, which is NaN, and one
    assert (run(copy.format(wait="cp.async.wait_group 1;") + store, start.copy()) == 0).all()
    assert (run(copy.format(wait="cp.async.wait_group 0;") + store, start.copy()) == start + 1).all()


def test_what_it_does_not_know_it_says() -> None:
    with pytest.raises(Unsupported, match=r"dp4a\.s32\.s32 %r5"):
        run("dp4a.s32.s32 %r5, %r1, %r1, %r1;", words())
    with pytest.raises(Unsupported, match=r"tanhh\.approx"):
        run("tanhh.approx.f32 %r5, %r1;", words())


A = np.array([0, 1, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF], np.uint32)


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("mul.hi.s32 {out}, {a}, {b}", lambda a, b: signed(a) * signed(b) >> 32),
        ("mul.hi.u32 {out}, {a}, {b}", lambda a, b: a * b >> 32),
        ("mad.lo.s32 {out}, {a}, {b}, {a}", lambda a, b: a * b + a),
        ("div.s32 {out}, {a}, 7", lambda a, b: abs(signed(a)) // 7 * (1 if signed(a) >= 0 else -1)),
        ("rem.s32 {out}, {a}, 7", lambda a, b: abs(signed(a)) % 7 * (1 if signed(a) >= 0 else -1)),
        ("shr.s32 {out}, {a}, {b}", lambda a, b: signed(a) >> min(b, 32)),
        ("shr.u32 {out}, {a}, {b}", lambda a, b: a >> min(b, 32)),
        ("shl.b32 {out}, {a}, {b}", lambda a, b: a << b if b < 32 else 0),
        ("bfe.s32 {out}, {a}, 4, 7", lambda a, b: signed(a >> 4 & 127, 7)),
        ("bfe.u32 {out}, {a}, 28, 7", lambda a, b: a >> 28),
        ("bfi.b32 {out}, {a}, {b}, 8, 12", lambda a, b: b & ~(0xFFF << 8) | (a & 0xFFF) << 8),
        ("shf.l.wrap.b32 {out}, {a}, {b}, 9", lambda a, b: b << 9 | a >> 23),
        ("shf.r.wrap.b32 {out}, {a}, {b}, 41", lambda a, b: (a | b << 32) >> 9),
        ("prmt.b32 {out}, {a}, {b}, 0x7610", lambda a, b: (a & 0xFFFF) | (b >> 16 & 0xFF) << 16 | (b >> 24) << 24),
        ("prmt.b32 {out}, {a}, {b}, 0x000B", lambda a, b: (a & 0xFF) * 0x01010100 + (0xFF if a >> 31 else 0)),
        ("lop3.b32 {out}, {a}, {b}, 0x0F0F0F0F, 0xCA", lambda a, b: a & b | ~a & 0x0F0F0F0F),
        ("popc.b32 {out}, {a}", lambda a, b: a.bit_count()),
        ("clz.b32 {out}, {a}", lambda a, b: 32 - a.bit_length()),
        ("brev.b32 {out}, {a}", lambda a, b: int(f"{a:032b}"[::-1], 2)),
        ("min.s32 {out}, {a}, {b}", lambda a, b: min(signed(a), signed(b))),
        ("cvt.s32.s8 {out}, {a}", lambda a, b: signed(a & 255, 8)),
        ("add.u32 {out}, {a}, {b}", lambda a, b: a + b),
    ],
    ids=lambda x: x.split(" ")[0] if isinstance(x, str) else "",
)
def test_integers(text: str, want) -> None:
    pairs = np.array([(a, b) for a in A for b in [*A, 3, 31, 32, 40]], np.uint32)
    n = len(pairs)
    table = np.concatenate([pairs.T.reshape(-1), np.zeros(n, np.uint32)])
    body = f"""
    setp.lt.u32 %p1, %r1, %r0; add.s64 %d3, %d2, {4 * n}; add.s64 %d4, %d2, {8 * n};
    mov.b32 %r10, 0; mov.b32 %r11, 0;
    @%p1 ld.global.b32 %r10, [%d2]; @%p1 ld.global.b32 %r11, [%d3];
    {text.format(out="%r5", a="%r10", b="%r11")};
    @%p1 st.global.b32 [%d4], %r5;"""
    got = run(body, table, n, threads=96)[2 * n :]
    assert [int(x) for x in got] == [want(int(a), int(b)) & 0xFFFFFFFF for a, b in pairs]


def test_nan_and_rounding() -> None:
    nan, huge = np.float32(np.nan), np.float32(3e9)
    x = np.array([nan, 1.5, 2.5, -1.5, huge, -huge, 1e-40, 65519.0, 65520.0], np.float32)
    got = {}
    for name, text in {
        "min": "min.f32 %r6, %r5, 0f40000000",
        "min.NaN": "min.NaN.f32 %r6, %r5, 0f40000000",
        "rni": "cvt.rni.s32.f32 %r6, %r5",
        "rmi": "cvt.rmi.s32.f32 %r6, %r5",
        "u32": "cvt.rzi.u32.f32 %r6, %r5",
        "ftz": "add.ftz.f32 %r6, %r5, 0f00000000",
        "half": "cvt.rn.f16.f32 %h1, %r5; cvt.f32.f16 %r6, %h1",
        "bf16": "cvt.rn.bf16.f32 %h1, %r5; cvt.f32.bf16 %r6, %h1",
        "gtu": "setp.gtu.f32 %p2, %r5, 0f40000000; selp.b32 %r6, 1, 0, %p2",
        "gt": "setp.gt.f32 %p2, %r5, 0f40000000; selp.b32 %r6, 1, 0, %p2",
    }.items():
        guarded = f"setp.lt.u32 %p1, %r1, 9; mov.b32 %r5, 0; @%p1 ld.global.b32 %r5, [%d2]; {text}; "
        got[name] = run(f"{guarded} @%p1 st.global.b32 [%d2], %r6;", x.view(np.uint32).copy(), threads=32)
    same = np.testing.assert_array_equal
    same(got["min"].view(np.float32), np.fmin(x, np.float32(2)))
    same(got["min.NaN"].view(np.float32), np.minimum(x, np.float32(2)))
    same(got["rni"].view(np.int32), [0, 2, 2, -2, 2**31 - 1, -(2**31), 0, 65519, 65520])
    same(got["rmi"].view(np.int32), [0, 1, 2, -2, 2**31 - 1, -(2**31), 0, 65519, 65520])
    same(got["u32"], [0, 1, 2, 0, 3000000000, 0, 0, 65519, 65520])
    same(got["ftz"].view(np.float32), [nan, 1.5, 2.5, -1.5, huge, -huge, 0, 65519, 65520])
    same(got["half"].view(np.float32)[[0, 1, 4, 6, 7, 8]], [nan, 1.5, np.inf, 0, 65504, np.inf])
    same(got["bf16"].view(np.float32)[[0, 1, 7, 8]], [nan, 1.5, 65536, 65536])
    same(got["gtu"], [1, 0, 1, 0, 1, 0, 0, 1, 1])
    same(got["gt"], [0, 0, 1, 0, 1, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("mode", "by", "control", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 9, 31, lambda lane: 9),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane < 29 else lane),
        ("idx", 2, 0x181F, lambda lane: lane & ~7 | 2),  # in segments of eight
        ("down", 3, 0x181F, lambda lane: lane + 3 if lane % 8 < 5 else lane),
    ],
)
def test_shuffles(mode: str, by: int, control: int, source) -> None:
    got = run(f"shfl.sync.{mode}.b32 %r5, %r1, {by}, {control}, -1; st.global.b32 [%d2], %r5;", words())
    assert [int(x) for x in got] == [lane & 32 | source(lane & 31) for lane in range(64)]


@pytest.mark.parametrize(("kind", "each", "k"), [("f16", 2, 16), ("f16", 2, 8), ("bf16", 2, 16), ("tf32", 1, 8)])
def test_matrix_products(kind: str, each: int, k: int) -> None:
    """Element by element where the manual puts it, from random numbers that each type holds exactly."""
    rng = np.random.default_rng(7)
    a, b, c = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, k), (k, 8), (16, 8)))
    counts = (k // 4 // each * 2, k // 4 // each, 4)
    registers = np.zeros((sum(counts), 32), np.uint32)

    def bits(x: float) -> int:
        if kind == "f16":
            return int(np.float16(x).view(np.uint16))
        return int(np.float32(x).view(np.uint32)) >> (16 if kind == "bf16" else 0)

    for lane in range(32):
        g, t = lane // 4, lane % 4
        for j in range(counts[0]):
            row, first = g + 8 * (j % 2), 4 * each * (j // 2) + each * t
            registers[j, lane] = sum(bits(a[row, first + e]) << (16 * e) for e in range(each))
        for j in range(counts[1]):
            first = 4 * each * j + each * t
            registers[counts[0] + j, lane] = sum(bits(b[first + e, g]) << (16 * e) for e in range(each))
        for j in range(4):
            registers[counts[0] + counts[1] + j, lane] = np.float32(c[g + 8 * (j // 2), 2 * t + j % 2]).view(np.uint32)
    n = len(registers)
    loads = " ".join(f"ld.global.b32 %r{20 + j}, [%d2+{128 * j}];" for j in range(n))
    names = [f"%r{20 + j}" for j in range(n)]
    vectors = [names[: counts[0]], names[counts[0] : -4], names[-4:]]
    text = ", ".join("{" + ", ".join(v) + "}" for v in vectors)
    store = " ".join(f"st.global.b32 [%d2+{128 * j}], %r{50 + j};" for j in range(4))
    mma = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%r50, %r51, %r52, %r53}}, {text};"
    got = run(f"{loads} {mma} {store}", registers.reshape(-1).copy(), threads=32)[:128].view(np.float32).reshape(4, 32)
    want = a @ b + c
    for lane in range(32):
        for j in range(4):
            assert got[j, lane] == want[lane // 4 + 8 * (j // 2), 2 * (lane % 4) + j % 2]


@pytest.mark.parametrize("swizzle", [1, 2, 3])
def test_swizzled_tiles(swizzle: int) -> None:
    """Rows of 128, 64 or 32 bytes: their chunks of 16 bytes are shuffled within the row, by the row."""
    width = {1: 128, 2: 64, 3: 32}[swizzle]
    chunks = width // 16
    descriptor = (1024 >> 4) | (8 * width >> 4) << 32 | swizzle << 62
    at = places(descriptor, 64, True) - 1024
    row, column = np.arange(64)[:, None], np.arange(16)[None, :]
    turn = row * width // 128 % chunks
    assert (at == row * width + ((column // 8) ^ turn) * 16 + column % 8 * 2).all()
    assert len(np.unique(at)) == at.size


def test_a_register_that_was_jumped_over_is_unspecified() -> None:
    """A compiler may leave it like this if the result is never used."""
    skip = "setp.ge.s32 %p1, %r1, 0; @%p1 bra BEHIND; mov.b16 %h1, 0; BEHIND: mov.b16 %h2, 7;"
    got = run(f"{skip} mov.b32 %r5, {{%h2, %h1}}; and.b32 %r6, %r5, 65535; st.global.b32 [%d2], %r6;", words())
    assert (got == 7).all()
