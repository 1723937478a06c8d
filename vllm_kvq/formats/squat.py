"""SQuat: KIVI's keys, corrected by the subspace of the prompt's queries; values as KIVI's.

With U (r x d) spanning the prompt's queries, the channels are quantized block by block, and every block first takes
back what the blocks before it did to the scores of those queries (x, y, k are columns of one token):

    M_t = (I rho + U_R U_R^T)^-1          R = channels of blocks t+1 .. T
    x_t = k_t - U_t^T M_{t-1} z,   y_t = deq(quant(x_t)),   z += U_t (y_t - k_t)      z = 0 before block 1

With rho = 1 / lambda that equals the paper's update with its d x d matrices, and needs only U.

Taking an error back moves it to directions beside U, where queries have energy, too. That energy grows with the prompt
as U^T U does, and a constant does not, so that a long prompt would have every direction of U protected at any cost to
the others. So rho follows it:

    rho = max(1 / lambda, floor * noise)      noise = energy of the queries beside U, per direction

`floor: 0` is the paper's rule.

The bytes are KIVI's (kivi.py): the correction is in the codes, and a page is read without U.

State: r rows, U of the prompt so far, and one that holds the noise in every channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.kivi import ChannelKeys
from vllm_kvq.formats.option import KEY_BITS, KEY_SCALES, TOKEN_SCALE, Option
from vllm_kvq.formats.quant import LIMIT
from vllm_kvq.formats.table import Format
from vllm_kvq.formats.values import TokenValues

NARROW = 16
"""The largest rank that every kernel knows."""
LEAST_BLOCK = 16
"""Channels of a block that kernels quantize at once."""


class SQuatKeys(ChannelKeys):
    name = "squat"
    title = "as kivi, corrected by the subspace of the prompt's queries"
    options = (
        KEY_BITS,
        KEY_SCALES,
        TOKEN_SCALE,
        Option("r", "rank of SQuat's query subspace", 5, low=1, high=64),
        Option("lambda", "SQuat's regularisation", 1e-3, low=1e-6, high=0.1, multiple=0),
        Option("floor", "times the queries' noise that 1 / lambda is at least; 0: the paper's rule", 4, low=0, high=64),
        Option("g", "channels per block of SQuat's update", low=1, high=128),
        Option("rope", "whether keys are stored as they are after RoPE, or before it", "after", ("after", "before")),
    )
    fits_queries = True

    @classmethod
    def changes(cls, options: Mapping[str, Any]) -> tuple[type, ...]:
        wide = (WideSubspace,) if options["r"] > NARROW else ()
        fine = (FineBlocks,) if options["g"] and options["g"] % LEAST_BLOCK else ()
        before = (BeforeRope,) if options["rope"] == "before" else ()
        return (*before, *fine, *wide, *super().changes(options))

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        super().__init__(geometry, options)
        if options["r"] >= geometry.head_size:
            raise ValueError(
                f"option 'r' is {options['r']}; a subspace of {geometry.head_size} channels is no more than "
                f"{geometry.head_size - 1} wide"
            )
        self.rank, self.lam, self.floor = options["r"], options["lambda"], options["floor"]
        self.state_rows = self.rank + 1
        self.beside = geometry.head_size - self.rank
        # two blocks at d = 128, never one: that is plain KIVI
        self.block = options["g"] or min(64, geometry.d // 2)
        if self.block >= geometry.head_size:
            raise ValueError(
                f"option 'g' is {self.block}, the whole head of {geometry.head_size} channels: that is KIVI; "
                "use kivi2 or a smaller g"
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

    def _quantize(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if state is None:
            return super()._quantize(x, None)
        u = state[:, : self.rank].unsqueeze(1)  # (U, 1, r, d): one subspace for all slabs of a unit
        rho = (self.floor * state[:, -1, 0].double()).clamp_min(1 / self.lam)
        z = torch.zeros(*x.shape[:-1], self.rank, device=x.device)
        codes, scales, zeros = [], [], []
        for start in range(0, self.d, self.block):
            at = slice(start, start + self.block)
            block, u_t = x[..., at], u[..., at]
            if start:
                # no further than any key reaches, so that what is read fits into float16
                block = (block - z @ self._pull(rho, u[..., start:], u_t)).clamp(-LIMIT, LIMIT)
            c, s, zero = super()._quantize(block, None)
            z = z + (torch.addcmul(zero, c, s) - x[..., at]) @ u_t.transpose(-2, -1)
            codes.append(c)
            scales.append(s)
            zeros.append(zero)
        return torch.cat(codes, -1), torch.cat(scales, -1), torch.cat(zeros, -1)

    def _pull(self, rho: torch.Tensor, rest: torch.Tensor, u_t: torch.Tensor) -> torch.Tensor:
        """M U_t with M = (I rho + U_R U_R^T)^-1 over the channels that are still open, (..., r, g) float32.

        In float64: U is not normalised, so |U|^2 grows with the prompt, and float32 loses rho beside it.
        """
        rest = rest.double()
        eye = torch.eye(self.rank, dtype=rest.dtype, device=rest.device)
        factor, _ = torch.linalg.cholesky_ex(eye * rho[:, None, None, None] + rest @ rest.transpose(-2, -1))
        return torch.cholesky_solve(u_t.double(), factor).float()


class WideSubspace:
    """`r` above 16, which the kernels for GPUs have no rows for."""


class FineBlocks:
    """`g` that is no multiple of 16, down to the paper's single channels: as many solutions per token as blocks."""

    reference_only = (
        f"option 'g' is served in multiples of {LEAST_BLOCK}; "
        "finer blocks are for vllm_kvq.roundtrip and the evaluation alone"
    )


class BeforeRope:
    """`rope`: before, the paper's SQuat-pre: keys, and the queries that U is made of, are as they were before RoPE."""

    before_rope = True


FORMATS = (
    Format("squat2", "SQuat, 2-bit keys", SQuatKeys, TokenValues, {"W": 32}, usual=1),
    Format("squat2_pre", "SQuat, 2-bit keys, before RoPE", SQuatKeys, TokenValues, {"W": 32, "rope": "before"}),
    Format("squat4", "SQuat, 4-bit keys", SQuatKeys, TokenValues, {"key_bits": 4, "value_bits": 4, "W": 32}),
)
