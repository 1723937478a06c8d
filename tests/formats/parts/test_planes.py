"""The plane-quad layout is a contract with the C++ and Triton kernels: the formula is written out here once
more."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvq.formats.parts import planes

# every count of codes that a codec packs: channels, pairs (d / 2) and sketch rows
SIZES = {
    1: (32, 64, 128, 256, 512),
    2: (32, 64, 96, 128, 192, 256),
    4: (32, 48, 96, 128, 256),
    8: (32, 64, 96, 128),
}
CASES = [(bits, n) for bits, sizes in SIZES.items() for n in sizes]


def random_codes(bits: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randint(0, 2**bits, (2, 3, 32, n)).astype(np.uint8))


@pytest.mark.parametrize(("bits", "n"), CASES)
def test_unpack_inverts_pack(bits: int, n: int) -> None:
    codes = random_codes(bits, n)
    keys, values = planes.pack_keys(codes, bits), planes.pack_values(codes, bits)
    assert keys.shape[2:] == planes.key_code_shape(n, bits)
    assert values.shape[2:] == planes.value_code_shape(n, bits)
    assert keys[0, 0].numel() == values[0, 0].numel() == 32 * n * bits // 8
    assert torch.equal(planes.unpack_keys(keys, bits), codes)
    assert torch.equal(planes.unpack_values(values, bits), codes)


@pytest.mark.parametrize(("bits", "n"), CASES)
def test_key_byte_positions(bits: int, n: int) -> None:
    """Code (t, c): plane c / stride of byte [(c % stride) / 4][t][c % 4], stride = n b / 8."""
    codes = random_codes(bits, n, seed=1)[0, 0].numpy()
    stride = n * bits // 8
    want = np.zeros(32 * stride, np.uint8)
    for t in range(32):
        for c in range(n):
            byte = (c % stride) // 4 * 128 + t * 4 + c % stride % 4
            want[byte] |= codes[t, c] << (c // stride * bits)
    got = planes.pack_keys(torch.from_numpy(codes), bits).numpy().ravel()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("bits", "n"), CASES)
def test_value_byte_positions(bits: int, n: int) -> None:
    """Code (t, c): plane c / stride of byte [t / 4][c % stride][t % 4], stride = n b / 8."""
    codes = random_codes(bits, n, seed=2)[0, 0].numpy()
    stride = n * bits // 8
    want = np.zeros(32 * stride, np.uint8)
    for t in range(32):
        for c in range(n):
            byte = t // 4 * stride * 4 + c % stride * 4 + t % 4
            want[byte] |= codes[t, c] << (c // stride * bits)
    got = planes.pack_values(torch.from_numpy(codes), bits).numpy().ravel()
    np.testing.assert_array_equal(got, want)


def test_one_code_by_hand() -> None:
    codes = torch.zeros(32, 128, dtype=torch.uint8)
    codes[5, 70] = 3
    # channel 70 = plane 2, channel 6 of the plane = quad 1, byte 2; token 5
    keys = planes.pack_keys(codes, 2).flatten()
    assert keys.nonzero().tolist() == [[1 * 128 + 5 * 4 + 2]]
    assert keys[150] == 3 << 4
    # token 5 = quad 1, byte 1
    values = planes.pack_values(codes, 2).flatten()
    assert values.nonzero().tolist() == [[1 * 32 * 4 + 6 * 4 + 1]]
    assert values[153] == 3 << 4


@pytest.mark.parametrize("bits", [0, 3, 5, 6, 7, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits"):
        planes.planes_of(bits)


@pytest.mark.parametrize("element", range(32))
def test_sign_word_of_one_element(element: int) -> None:
    bits = torch.zeros(32, dtype=torch.bool)
    bits[element] = True
    word = planes.pack_sign_words(bits)
    assert word.dtype == torch.int32
    assert int(word) & 0xFFFFFFFF == 1 << (8 * (element % 4) + element // 4)


@given(st.lists(st.booleans(), min_size=32, max_size=32))
def test_sign_words_are_the_byte_masks_of_the_quads(signs: list[bool]) -> None:
    word = int(planes.pack_sign_words(torch.tensor(signs))) & 0xFFFFFFFF
    for quad in range(8):
        mask = (word >> quad & 0x01010101).to_bytes(4, "little")
        assert list(mask) == [int(s) for s in signs[4 * quad : 4 * quad + 4]]
    back = planes.unpack_sign_words(planes.pack_sign_words(torch.tensor([signs, signs[::-1]])))
    assert back.tolist() == [signs, signs[::-1]]
