"""SQuat keys (and KIVI's, which are SQuat's without the subspace).

Per channel, groups of G = 32 tokens, asymmetric rounding. With U (r x d) spanning the prompt's queries, the channels
are quantized block by block, and every block first takes back what the blocks before it did to the scores of those
queries (METHODS, "SQuat"; x, y, k are columns of one token):

    M_t = (I / lambda + U_R U_R^T)^-1          R = channels of blocks t+1 .. T
    x_t = k_t - U_t^T M_{t-1} z,   y_t = deq(quant(x_t)),   z += U_t (y_t - k_t)      z = 0 before block 1

which equals the paper's update with its d x d matrices and needs only U.

Slab (32 tokens; d = 128, b = 2): 1536 bytes, 3.0 bits per element

    k_scale  f16  [d]                           256   per channel in natural order: a kernel folds them into q,
    k_zero   f16  [d]                           256     once per slab and query
    k_codes  u8   [d b / 32 quads][32][4]      1024   plane-quad: the channel is the reduction dimension of q K

A page is read without U: the correction is in the codes.
"""

from __future__ import annotations

import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.fields import Field, Packed
from vllm_kvq.formats.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.quant import affine_codes, affine_parameters


class ChannelKeys(KeyCodec):
    """KIVI: per channel over 32 tokens."""

    def __init__(self, geometry: Geometry, bits: int) -> None:
        self.d, self.bits = geometry.d, bits

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_scale", torch.float16, (self.d,)),
            Field("k_zero", torch.float16, (self.d,)),
            Field("k_codes", torch.uint8, key_code_shape(self.d, self.bits)),
        )

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        codes, scale, zero = self._quantize(x.unflatten(1, (-1, SLAB)), state)
        return {
            "k_scale": scale.squeeze(-2),
            "k_zero": zero.squeeze(-2),
            "k_codes": pack_keys(codes, self.bits),
        }

    def _quantize(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(U, s, 32, d) -> codes of that shape, scale and zero (U, s, 1, d)."""
        scale, zero = affine_parameters(x, -2, self.bits)
        return affine_codes(x, scale, zero, self.bits), scale, zero

    def unpack(self, fields: Packed) -> torch.Tensor:
        codes = unpack_keys(fields["k_codes"], self.bits).float()
        scale, zero = (fields[n].float().unsqueeze(-2) for n in ("k_scale", "k_zero"))
        return torch.addcmul(zero, codes, scale).flatten(1, 2)


class SQuatKeys(ChannelKeys):
    """The query-subspace correction on top of `ChannelKeys`."""

    fits_queries = True

    def __init__(self, geometry: Geometry, bits: int, rank: int, lam: float, block: int) -> None:
        super().__init__(geometry, bits)
        self.state_rows, self.lam, self.block = rank, lam, min(block, geometry.d)

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """U = diag(S[:r]) Vh[:r] of the stacked prompt queries, from the eigenvectors of their Gram matrix.

        Chunks are merged through U itself: the rows of U stand for all queries seen before.
        """
        rows = queries.double()  # sums over long prompts, and the same subspace on every device
        return self.fit_gram(rows.transpose(1, 2) @ rows, state)

    def fit_gram(self, gram: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The same from the queries' Gram matrix (H, d, d) in float64."""
        if state is not None:
            before = state.double()
            gram = gram + before.transpose(1, 2) @ before
        eigenvalues, vectors = torch.linalg.eigh(gram)
        top = eigenvalues[:, -self.state_rows :].flip(-1).clamp_min(0).sqrt()
        return (top.unsqueeze(-1) * vectors[..., -self.state_rows :].flip(-1).transpose(1, 2)).float()

    def _quantize(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if state is None:
            return super()._quantize(x, None)
        u = state.unsqueeze(1)  # (U, 1, r, d): one subspace for all slabs of a unit
        z = torch.zeros(*x.shape[:-1], self.state_rows, device=x.device)
        codes, scales, zeros = [], [], []
        for start in range(0, self.d, self.block):
            at = slice(start, start + self.block)
            block, u_t = x[..., at], u[..., at]
            if start:
                block = block - z @ self._pull(u[..., start:], u_t)
            c, s, zero = super()._quantize(block, None)
            z = z + (torch.addcmul(zero, c, s) - x[..., at]) @ u_t.transpose(-2, -1)
            codes.append(c)
            scales.append(s)
            zeros.append(zero)
        return torch.cat(codes, -1), torch.cat(scales, -1), torch.cat(zeros, -1)

    def _pull(self, rest: torch.Tensor, u_t: torch.Tensor) -> torch.Tensor:
        """M U_t with M = (I / lambda + U_R U_R^T)^-1 over the channels that are still open, (..., r, g) float32.

        In float64: U is not normalised, so |U|^2 grows with the prompt, and float32 loses 1 / lambda beside it.
        """
        rest = rest.double()
        eye = torch.eye(self.state_rows, dtype=rest.dtype, device=rest.device)
        factor, _ = torch.linalg.cholesky_ex(eye / self.lam + rest @ rest.transpose(-2, -1))
        return torch.cholesky_solve(u_t.double(), factor).float()
