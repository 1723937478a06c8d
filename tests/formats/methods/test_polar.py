"""PolarQuant: pairs, angles across the seam, the shortest arc by brute force, error bounds of both grids."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.methods.polar import PaperPolarKeys, PolarKeys, pair_order, shortest_arc

TURN = 2 * math.pi
PI = float(np.float32(math.pi))
ANGLES = st.floats(-PI, PI, width=32)
SEAM = [PI, -PI, np.nextafter(np.float32(math.pi), np.float32(0)).item(), 0.0, -0.0]


def bits(m: int, n: int) -> dict[str, int]:
    return {"angle_bits": m, "radius_bits": n}


def keys_of(phi: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """(N, pairs) angles and radii -> (1, N, 2 pairs) rotate-half keys."""
    return torch.cat([r * phi.cos(), r * phi.sin()], dim=-1)[None].float()


def polar_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.double().chunk(2, dim=-1)
    return torch.atan2(b, a), torch.hypot(a, b)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The angle between, on the circle: in [0, pi]."""
    return (torch.remainder(x + math.pi, TURN) - math.pi).abs()


# -- pairs
# -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEAD_SIZES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
def test_pairs(head: int, pairing: str, partial: float) -> None:
    rotary = int(head * partial) // 2 * 2
    geometry = Geometry(head, 64, pairing=pairing, rotary_dim=rotary)
    x, y = pair_order(geometry).tolist()
    assert sorted(x + y) == list(range(geometry.d)), "every channel is in one pair"
    for i in range(rotary // 2):
        assert (x[i], y[i]) == ((i, i + rotary // 2) if pairing == "half" else (2 * i, 2 * i + 1))
    rest = [*zip(x[rotary // 2 :], y[rotary // 2 :], strict=True)]
    assert all(a >= rotary and b >= rotary for a, b in rest)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [128, 64, 32])
def test_rope_moves_angles_of_pairs_and_keeps_radii(pairing: str, rotary: int) -> None:
    """The pairs are RoPE's own: rotating a key leaves every pair's radius as it is."""
    geometry = Geometry(128, 64, pairing=pairing, rotary_dim=rotary)
    key = torch.randn(64, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    cos, sin = angle.cos(), angle.sin()
    out = key.clone()
    first, second = (slice(0, rotary // 2), slice(rotary // 2, rotary))
    if pairing == "interleaved":
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    out[:, first] = key[:, first] * cos - key[:, second] * sin
    out[:, second] = key[:, second] * cos + key[:, first] * sin
    x, y = pair_order(geometry)
    radius = [torch.hypot(k[:, x], k[:, y]) for k in (key, out)]
    assert torch.allclose(radius[0], radius[1])
    assert not torch.allclose(out, key)


@pytest.mark.parametrize("codec_class", [PolarKeys, PaperPolarKeys])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [128, 64])
def test_an_outlier_disturbs_its_own_pair_only(codec_class: type[PolarKeys], pairing: str, rotary: int) -> None:
    geometry = Geometry(128, 64, pairing=pairing, rotary_dim=rotary)
    codec = codec_class(geometry, bits(4, 4))
    key = torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(1))
    far = key.clone()
    far[0, 9, 33] = 1e4
    differs = (codec.unpack(codec.pack(key, None)) != codec.unpack(codec.pack(far, None))).any(1)[0].nonzero()
    partner = {("half", 128): 97, ("half", 64): 1, ("interleaved", 128): 32, ("interleaved", 64): 32}
    assert set(differs.flatten().tolist()) == {33, partner[pairing, rotary]}


# -- the shortest arc
# ------------------------------------------------------------------------------------------------
@given(st.lists(ANGLES | st.sampled_from(SEAM), min_size=1, max_size=12))
def test_shortest_arc_by_brute_force(angles: list[float]) -> None:
    phi = torch.tensor(angles)[None, :, None]
    low, gap = shortest_arc(phi)
    first, width = low.item(), TURN - gap.item()
    # over every angle as a start: the smallest arc that goes up from it and holds all
    best = min(max((a - start) % TURN for a in angles) for start in angles)
    # an angle just below the start counts as a whole turn above it: leave the rounding to the other starts
    assert width == pytest.approx(best, abs=1e-5) or best > TURN - 1e-5
    assert min(abs(first - a) for a in angles) < 1e-6
    for a in angles:
        above = (a - first + 1e-5) % TURN - 1e-5
        assert above <= width + 1e-5


def test_cluster_at_the_seam_has_a_small_arc() -> None:
    """Angles around +-pi: min and max over the line would span the whole circle."""
    phi = torch.remainder(math.pi + 0.1 * torch.linspace(-1, 1, 64) + math.pi, TURN) - math.pi
    low, gap = shortest_arc(phi[None, :, None])
    assert TURN - gap.item() == pytest.approx(0.2, abs=1e-5)
    assert low.item() == pytest.approx(math.pi - 0.1, abs=1e-5)


# -- the grouped grid
# ------------------------------------------------------------------------------------------------
def check_bound(phi: torch.Tensor, r: torch.Tensor, m: int, n: int) -> None:
    """|angle error| <= dphi / 2 and |radius error| <= dr / 2, but for the float16 rounding of the
    parameters."""
    codec = PolarKeys(Geometry(2 * phi.shape[1], len(phi)), bits(m, n))
    x = keys_of(phi, r)
    fields = codec.pack(x, None)
    hat = codec.unpack(fields)[0]
    (phi, r), (phi_hat, r_hat) = polar_of(x[0]), polar_of(hat)
    dphi, dr = fields["k_angle_step"].double()[0], fields["k_radius_step"].double()[0]
    arc = TURN - shortest_arc(phi[None])[1][0]
    assert (dphi <= arc / 2**m * (1 + 2**-10) + 1e-6).all()
    # phi0 is off by up to 2^-10; a rounded-down step falls short of the far end by 2^-11 of the range
    slack = 2**-10 + arc * 2**-11 + 2e-5
    bound = dphi / 2 + slack
    # a radius near zero has no angle to speak of
    big = (r > 1e-3) & (r_hat > 1e-3)
    assert (turned(phi - phi_hat) <= bound)[big].all()
    slack = r.amax(0) * 2**-10 + 1e-6
    assert ((r - r_hat).abs() <= dr / 2 + slack).all()


@pytest.mark.parametrize(("m", "n"), [(4, 4), (4, 2), (2, 4), (2, 2)])
@pytest.mark.parametrize("spread", [TURN, 3.0, 0.2, 0.01, 0.0])
@pytest.mark.parametrize("centre", [math.pi, 0.0, math.pi / 2, -math.pi / 2, 2.0, -3.0])
def test_grouped_error_bound(m: int, n: int, spread: float, centre: float) -> None:
    g = torch.Generator().manual_seed(0)
    phi = centre + spread * (torch.rand(64, 32, generator=g, dtype=torch.float64) - 0.5)
    check_bound(phi, 5 + torch.rand(64, 32, generator=g, dtype=torch.float64), m, n)


@given(st.integers(0, 10**6), st.floats(0.01, 1000))
def test_grouped_error_bound_with_seam_and_axes(seed: int, size: float) -> None:
    """Angles exactly on the seam and on the borders of the quadrants among random ones."""
    rng = np.random.RandomState(seed)
    phi = rng.uniform(-math.pi, math.pi, (32, 32)) * rng.choice([0.01, 1.0], 32)
    special = rng.choice([math.pi, -math.pi, 0, math.pi / 2, -math.pi / 2], (32, 32))
    phi = np.where(rng.random_sample((32, 32)) < 0.3, special, phi)
    check_bound(torch.from_numpy(phi), torch.from_numpy(size * rng.uniform(0.1, 1, (32, 32))), 4, 4)


@pytest.mark.parametrize("codec_class", [PolarKeys, PaperPolarKeys])
def test_axes_exactly(codec_class: type[PolarKeys]) -> None:
    """(+-1, 0), (0, +-1) and signed zeros, separately and together on a page."""
    points = [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (-1.0, -0.0), (1.0, -0.0), (0.0, 0.0)]
    codec = codec_class(Geometry(64, 32), bits(4, 4))
    for choice in [points, *([p] for p in points)]:
        xy = torch.tensor(choice * 32)[:32]
        key = torch.cat([xy[:, :1].expand(-1, 32), xy[:, 1:].expand(-1, 32)], dim=-1)[None]
        hat = codec.unpack(codec.pack(key, None))
        assert (hat - key).abs().max() < 0.21  # half a cell of 2 pi / 16


def test_the_widest_gap_is_cut() -> None:
    """Keys around the seam come back as well as the same keys rotated away from it."""
    g = torch.Generator().manual_seed(0)
    phi = 0.5 * torch.randn(64, 32, generator=g, dtype=torch.float64)
    r = 5 + torch.rand(64, 32, generator=g, dtype=torch.float64)
    codec = PolarKeys(Geometry(64, 64), bits(4, 4))
    error = []
    for centre in (0.0, math.pi):
        key = keys_of(phi + centre, r)
        error.append((codec.unpack(codec.pack(key, None)) - key).norm())
    assert error[1] == pytest.approx(error[0].item(), rel=0.05)


# -- the paper's grid
# ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "n"), [(4, 4), (4, 2), (2, 2)])
def test_paper_grid(m: int, n: int) -> None:
    """Angles are multiples of 2 pi / 2^m, radii of max r / (2^n - 1); both the nearest; +K comes back, not
    -K."""
    g = torch.Generator().manual_seed(2)
    phi = TURN * (torch.rand(64, 32, generator=g, dtype=torch.float64) - 0.5)
    phi[:5, 0] = torch.tensor([math.pi, -math.pi, 0, math.pi / 2, -math.pi / 2])
    key = keys_of(phi, 1 + 9 * torch.rand(64, 32, generator=g, dtype=torch.float64))
    codec = PaperPolarKeys(Geometry(64, 64), bits(m, n))
    fields = codec.pack(key, None)
    (phi, r), (phi_hat, r_hat) = polar_of(key[0]), polar_of(codec.unpack(fields)[0])
    step, s = TURN / 2**m, r.amax(0) / (2**n - 1)
    assert torch.allclose(fields["k_radius_step"].double()[0], s, rtol=2**-11)
    # the angle of a radius of zero is lost
    seen = r_hat > 1e-6
    on_grid = turned(phi_hat - (phi_hat / step).round() * step)
    assert (on_grid[seen] < 1e-5).all()
    assert (turned(phi - phi_hat)[seen] <= step / 2 + 1e-5).all()
    assert ((r - r_hat).abs() <= s / 2 + r.amax(0) * 2**-10).all()
    hat = codec.unpack(fields)
    assert (hat * key).sum() > 0.85 * hat.norm() * key.norm(), "-K is no reconstruction of K"


def test_paper_page_stores_one_number_per_pair() -> None:
    codec = PaperPolarKeys(Geometry(128, 64), bits(4, 4))
    assert [(f.name, f.nbytes) for f in codec.page_fields] == [("k_radius_step", 128)]
    assert sum(f.nbytes for f in PolarKeys(Geometry(128, 64), bits(4, 4)).page_fields) == 512


# -- codes in bytes
# --------------------------------------------------------------------------------------------------
def test_nibbles_hold_angle_low_and_radius_high() -> None:
    codec = PolarKeys(Geometry(64, 32), bits(4, 4))
    key = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(3))
    data = codec.pack(key, None)["k_polar"][0, 0]
    fields = codec.pack(key, None)
    phi, r = polar_of(key[0])
    low, step = (fields[n][0].double() for n in ("k_angle0", "k_angle_step"))
    for token, pair in ((0, 0), (7, 13), (31, 31), (16, 4)):
        byte = int(data[pair // 4, token, pair % 4])
        # within a cell of where the definition puts it; exactly there away from the borders
        place = ((phi[token, pair] - low[pair] + 0.1) % TURN - 0.1) / step[pair]
        assert abs((byte & 15) + 0.5 - place.clamp(0, 16)) <= 0.5 + 0.02
        r0, dr = (fields[n][0].double()[pair] for n in ("k_radius0", "k_radius_step"))
        assert abs((byte >> 4) + 0.5 - ((r[token, pair] - r0) / dr).clamp(0, 16)) <= 0.5 + 0.02


def test_six_bits_take_six_bits() -> None:
    codec = PolarKeys(Geometry(128, 64), bits(4, 2))
    assert [f.nbytes for f in codec.slab_fields] == [32 * 64 * 4 // 8, 32 * 64 * 2 // 8]


# -- the paper's rows
def stored(codec: PolarKeys, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """Angle codes of one slab, bit by bit from the bytes: (32, pairs)."""
    low, high = fields["k_angle"][0, 0], fields["k_angle_high"][0, 0]
    found = torch.zeros(32, codec.pairs, dtype=torch.long)
    padded = -(-codec.pairs // 32) * 32
    for p in range(codec.pairs):
        at, plane = p % (codec.pairs // 4), p // (codec.pairs // 4)
        found[:, p] = low[at // 4, :, at % 4].long() >> (2 * plane) & 3
        at, plane = p % (padded // 8), p // (padded // 8)
        found[:, p] += (high[at // 4, :, at % 4].long() >> plane & 1) << 2
    return found


@pytest.mark.parametrize("d", [64, 96, 128])
def test_three_bit_angles(d: int) -> None:
    """All eight codes, from the bytes, as the paper defines them; both grids read what they wrote."""
    g = torch.Generator().manual_seed(3)
    phi = TURN * torch.rand(32, d // 2, generator=g)
    x = keys_of(phi, 1 + torch.rand(32, d // 2, generator=g))
    for mode in ("paper", "grouped"):
        codec = PolarKeys.bind(Geometry(d, 32, pairing="half"), {"mode": mode, **bits(3, 4)})
        fields = codec.pack(x, None)
        codes = stored(codec, fields)
        assert codes.unique().tolist() == list(range(8))
        if mode == "paper":
            assert torch.equal(codes, (phi / (TURN / 8)).round().long() % 8)
        got = polar_of(codec.unpack(fields)[0])[0]
        assert turned(got - phi).max() <= TURN / 16 + 1e-3


def test_the_papers_row_of_3_29_bits() -> None:
    """m4n2 in groups of 64 tokens: a step per pair and group, and 128 tokens of a prompt of 12.2K in 16 bits."""
    page = FORMATS["polar3"].bind(Geometry(128, 64), {"mode": "paper", "values": "raw"})
    assert page.W == 128
    bits_of_keys = page.half_bits_per_element("keys") + 16 * page.W / (12.2 * 1024)
    assert round(bits_of_keys, 2) == 3.29
