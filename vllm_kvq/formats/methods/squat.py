"""SQuat: keys corrected by the subspace of the prompt's queries, in the bytes of Kitty or of KIVI.

With U (r x d) spanning the prompt's queries, the channels are quantized block by block, and every block first corrects
what the blocks before it did to the scores of those queries (x, y, k are columns of one token):

    M_t = (I rho + U_R U_R^T)^-1          R = channels of blocks t+1 .. T
    x_t = k_t - U_t^T M_{t-1} z,   y_t = deq(quant(x_t)),   z += U_t (y_t - k_t)      z = 0 before block 1

With rho = 1 / lambda that equals the paper's update with its d x d matrices, and needs only U.

Correcting an error moves it to directions outside U, where queries have energy, too. That energy grows with the prompt
as U^T U does, but a constant rho does not: for a long prompt every direction of U would be protected at any cost to
the others. Therefore rho follows it:

    rho = max(1 / lambda, floor * noise)      noise = energy of the queries outside U, per direction

`floor: 0` is the paper's rule.

The option `boost` determines `quant`, and with it the bytes:

    none       KIVI's, key_bits for every channel (kivi.py)
    a part     Kitty's: 4 bits for that part of the channels, 2 for the others (kitty.py)
    left out   a quarter; none with key_bits 4, a token scale, or keys stored before RoPE

The correction is in the codes: a page is as large as Kitty's or KIVI's, and is read without U by the same kernels.

A slab (32 tokens) of boosted keys is packed in this order:

    1. span of every channel over the 32 tokens of k; the widest are boosted, the first of equals, as in Kitty. These
       are keys before any correction, and the choice is final: the remaining range of a channel plays no role.
    2. for each block t of g channels (the last block may be smaller):
         x_t           = clamp(k_t - U_t^T M_{t-1} z, +-32768)                    block 1: k_1
         scale, zero   of each channel of x_t over the 32 tokens, for 4 bits if boosted, else 2; of the range or fitted
         code          = round((x_t - zero) / scale), 0 .. 15 if boosted, else 0 .. 3
         z            += U_t (zero + code * scale - k_t)                          with scale and zero as float16
    3. k_scale (its sign bit set if boosted), k_zero, low digits k_codes, and high digits k_high of boosted channels

U, the noise and g are those of plain keys, and M is solved in float64: U is not normalised. A request without a state
has U = 0, for which this equals Kitty's packing to the byte.

State: r rows, U of the prompt so far, and one row that holds the noise in every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.kitty import LOW, USUAL, BoostedKeys
from vllm_kvq.formats.methods.kivi import ChannelKeys
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.option import BOOST, KEY_BITS, KEY_SCALES, TOKEN_SCALE, Option
from vllm_kvq.formats.parts.quant import LIMIT, Quantized
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.variant import variant

NARROW = 16
"""The largest rank that every kernel supports."""
LEAST_BLOCK = 16
"""Channels of a block that kernels quantize at once."""
BESIDE_BOOST = (("key_bits", LOW), ("token_scale", "none"))
"""The values of other options that boosted channels require."""


class Corrected(KeyCodec):
    """The subspace and the correction, whatever is stored; `bind` selects one of the two classes below."""

    name = "squat"
    title = "as kivi or kitty, corrected by the subspace of the prompt's queries"
    options: ClassVar[tuple[Option, ...]] = (
        KEY_BITS,
        KEY_SCALES,
        TOKEN_SCALE,
        BOOST,
        Option("r", "rank of SQuat's query subspace", 5, low=1, high=64),
        Option("lam", "SQuat's regularisation, lambda in the paper", 1e-3, low=1e-6, high=0.1, multiple=0),
        Option("floor", "lower limit of 1 / lam, times the queries' noise; 0: the paper's rule", 4, low=0, high=64),
        Option("g", "channels per block of SQuat's update", low=1, high=128),
        Option(
            "rope",
            "whether keys are stored as they are after RoPE, or before it, which is not served",
            "after",
            ("after", "before"),
        ),
    )
    fits_queries = True

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> Self:
        plain = _is_plain(options)
        if not plain:
            _refuse_beside_boost(options)
        stored: type[Corrected] = SQuatKeys if plain else BoostedSQuatKeys
        wide = (WideSubspace,) if options["r"] > NARROW else ()
        fine = (FineBlocks,) if options["g"] and options["g"] % LEAST_BLOCK else ()
        before = (BeforeRope,) if options["rope"] == "before" else ()
        # both layouts treat the options that they share alike
        changes = (*before, *fine, *wide, *ChannelKeys.changes(options))
        return cast(Self, variant(stored, *changes)(geometry, options))

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        if options["r"] >= geometry.head_size:
            raise ValueError(
                f"option 'r' is {options['r']}; a subspace of {geometry.head_size} channels is no more than "
                f"{geometry.head_size - 1} wide"
            )
        self.d = geometry.d
        self.rank, self.lam, self.floor = options["r"], options["lam"], options["floor"]
        self.state_rows = self.rank + 1
        self.beside = geometry.head_size - self.rank
        # two blocks up to d = 128, never one: nothing would be corrected
        self.block = options["g"] or min(64, geometry.d // 2)
        if self.block >= geometry.head_size:
            plain = _is_plain(options)
            raise ValueError(
                f"option 'g' is {self.block}, the whole head of {geometry.head_size} channels: that is "
                f"{'KIVI; use kivi2' if plain else 'Kitty; use kitty2'} or a smaller g"
            )

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """U = diag(S[:r]) Vh[:r] of the stacked prompt queries, from the eigenvectors of their Gram matrix; the noise.

        Chunks are merged through U itself: the rows of U stand for all queries seen before.
        """
        rows = queries.double()  # sums over long prompts, and the same subspace on every device
        return self.fit_gram(rows.transpose(1, 2) @ rows, state)

    def fit_gram(self, gram: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The same from the queries' Gram matrix (H, d, d) in float64."""
        if state is not None:
            before = state[:, : self.rank].double()
            gram = gram + before.transpose(1, 2) @ before
        eigenvalues, vectors = torch.linalg.eigh(gram)
        eigenvalues = eigenvalues.clamp_min(0)
        top = eigenvalues[:, -self.rank :].flip(-1).sqrt()
        u = top.unsqueeze(-1) * vectors[..., -self.rank :].flip(-1).transpose(1, 2)
        noise = eigenvalues[:, : -self.rank].sum(-1) / self.beside
        if state is not None:
            noise = noise + state[:, -1, 0]
        return torch.cat([u, noise[:, None, None].expand(-1, 1, self.d)], 1).float()

    def _correct(
        self, x: torch.Tensor, state: torch.Tensor | None, quantize: Callable[[torch.Tensor, slice], Quantized]
    ) -> Quantized:
        """Keys (U, s, 32, d), block by block; `quantize` gets a corrected block and its channels."""
        if state is None:
            return quantize(x, slice(None))
        u = state[:, : self.rank].unsqueeze(1)  # (U, 1, r, d): one subspace for all slabs of a unit
        rho = (self.floor * state[:, -1, 0].double()).clamp_min(1 / self.lam)
        z = torch.zeros(*x.shape[:-1], self.rank, device=x.device)
        codes, scales, zeros = [], [], []
        for start in range(0, self.d, self.block):
            at = slice(start, start + self.block)
            block, u_t = x[..., at], u[..., at]
            if start:
                # limited to the range of keys, so that what is read fits into float16
                block = (block - z @ self._pull(rho, u[..., start:], u_t)).clamp(-LIMIT, LIMIT)
            c, s, zero = quantize(block, at)
            z = z + (torch.addcmul(zero, c, s) - x[..., at]) @ u_t.transpose(-2, -1)
            codes.append(c)
            scales.append(s)
            zeros.append(zero)
        return torch.cat(codes, -1), torch.cat(scales, -1), torch.cat(zeros, -1)

    def _pull(self, rho: torch.Tensor, rest: torch.Tensor, u_t: torch.Tensor) -> torch.Tensor:
        """M U_t with M = (I rho + U_R U_R^T)^-1 over the channels that are still open, (..., r, g) float32.

        Computed in float64: U is not normalised, so |U|^2 grows with the prompt, and float32 would lose rho next to it.
        """
        rest = rest.double()
        eye = torch.eye(self.rank, dtype=rest.dtype, device=rest.device)
        factor, _ = torch.linalg.cholesky_ex(eye * rho[:, None, None, None] + rest @ rest.transpose(-2, -1))
        return torch.cholesky_solve(u_t.double(), factor).float()


class SQuatKeys(Corrected, ChannelKeys):
    """`boost`: none, the paper's: KIVI's bytes."""

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        ChannelKeys.__init__(self, geometry, options)
        Corrected.__init__(self, geometry, options)

    def _quantize(self, x: torch.Tensor, state: torch.Tensor | None) -> Quantized:
        plain = super()._quantize
        return self._correct(x, state, lambda block, at: plain(block, None))


class BoostedSQuatKeys(Corrected, BoostedKeys):
    """`boost`: a part of the channels: Kitty's bytes, and its choice of channels, made before any correction."""

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        BoostedKeys.__init__(self, geometry, options)
        Corrected.__init__(self, geometry, options)

    def _quantize(self, x: torch.Tensor, boosted: torch.Tensor, state: torch.Tensor | None) -> Quantized:
        plain = super()._quantize
        return self._correct(x, state, lambda block, at: plain(block, boosted[..., at], None))


def _is_plain(options: Mapping[str, Any]) -> bool:
    allowed = all(options[name] == only for name, only in BESIDE_BOOST) and options["rope"] == "after"
    return (options["boost"] or (USUAL if allowed else "none")) == "none"


def _refuse_beside_boost(options: Mapping[str, Any]) -> None:
    for name, only in BESIDE_BOOST:
        if options[name] != only:
            raise ValueError(
                f"option {name!r} is {options[name]!r}, which keys with boosted channels can't have (option 'boost' is "
                f"{options['boost']!r}); set 'boost' to 'none', or {name!r} to {only!r}"
            )


class WideSubspace:
    """`r` above 16, which the kernels for GPUs have no rows for."""


class FineBlocks:
    """`g` that is not a multiple of 16, down to the paper's single channels: one solution per token and block."""

    reference_only = (
        f"option 'g' is served in multiples of {LEAST_BLOCK}; "
        "finer blocks are only for vllm_kvq.roundtrip and the evaluation"
    )


class BeforeRope:
    """`rope`: before, the paper's SQuat-pre: keys, and the queries that U spans, are as they were before RoPE."""

    before_rope = True
    reference_only = (
        "option 'rope' is served only as 'after'; keys before RoPE are for vllm_kvq.roundtrip and the evaluation"
    )


PLAIN: dict[str, Any] = {
    "boost": "none",
    "key_scales": "range",
    "value_scales": "range",
    "value_rotation": "none",
    "group": 32,
}
"""With these options `squat2` stores what the paper does: no sinks (`S: 0`) and the paper's rho (`floor: 0`)."""

FORMATS = (
    Format(
        "squat2",
        "SQuat, boosted keys",
        SQuatKeys,
        TokenValues,
        {
            "key_scales": "fitted",
            "value_scales": "fitted",
            "value_rotation": "hadamard",
            "group": 256,
            "W": 32,
        },
    ),
    Format("squat4", "SQuat, 4-bit keys", SQuatKeys, TokenValues, {"key_bits": 4, "value_bits": 4, "W": 32}),
)
