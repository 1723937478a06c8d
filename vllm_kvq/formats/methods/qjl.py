"""QJL: keys as one sign bit per row of a random sketch, and norms; values per token (values.py).

Queries are never quantized to one bit:

    bits = sign(S k_in),  bits' = sign(S' k_out)
    q . k  ~  c(d)/m |k_in| <S q_in, bits>  +  c(n)/m' |k_out| <S' q_out, bits'>

k_out are n = d / 16 outlier channels, k_in is the rest. Which channels is decided by the prompt: the n with the
largest L2 norm over all its keys (`outlier_choice`: "prompt"). The slabs of a request thus share their set, and a
kernel prepares its query once instead of once per slab. Every slab names its set all the same: a page is read without
the request's state, and a kernel that meets another set must prepare its query again. If no prompt can decide,
a slab takes the n largest of its own 32 tokens:

    a prompt of fewer than 32 tokens    all slabs; chunks of a prompt count together
    a request with a prefix hit         decides by the tokens it computes itself, by default at least W;
                                        the pages it found keep what they name
    `outlier_choice`: "slab"            always

With `outliers`: 0 all channels are inliers, and a slab has only the first two fields.

The rows of S (m x d) are Gaussian directions, orthogonalised in blocks of d, of length sqrt(d); S' (m' x n) uses only
the n outlier coordinates, in blocks of n. For such rows the unbiased constant is

    c(d) = sqrt(pi) Gamma((d + 1) / 2) / (sqrt(d) Gamma(d / 2))

(The Gaussian's sqrt(pi / 2) would overestimate.) With `sketch`: gaussian all entries are independent normal numbers,
as in the paper's analysis, and the constant is c = sqrt(pi / 2). |k_in| is stored itself, not derived from |k| and
|k_out|.

Slab (32 tokens; d = 128, m = 2d, m' = d, n = 8): 1728 bytes, 3.27 bits per element before alignment

    k_bits    u8   [m / 32 quads][32][4]    1024   plane-quad with 8 planes: the sketch row is the reduction dimension
    k_norm    f16  [32]                       64
    ko_bits   u8   [m' / 32 quads][32][4]    512
    ko_norm   f16  [32]                       64
    ko_index  u8   [n]                         8   the slab's outlier channels, ascending (padded to 64 bytes)

State: 2 rows: sums of squares per channel, and the number of tokens summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_kvq.formats.codec import Geometry, KeyCodec
from vllm_kvq.formats.methods.values import TokenValues
from vllm_kvq.formats.option import Option
from vllm_kvq.formats.parts.fields import Field, Packed
from vllm_kvq.formats.parts.planes import SLAB, key_code_shape, pack_keys, unpack_keys
from vllm_kvq.formats.parts.quant import half
from vllm_kvq.formats.table import Format


def sphere_constant(d: int) -> float:
    """c with E[c sign(s . k) (s . q)] = q . k / |k| for s uniform on the sphere of radius sqrt(d) in R^d."""
    return math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


@functools.lru_cache(maxsize=512)
def sketch(rows: int, d: int, seed: int) -> torch.Tensor:
    """(rows, d) float32: random rows of length sqrt(d), orthogonal within each block of d.

    NumPy's legacy generator is frozen by NumPy's own policy: the same seed gives the same sketch on every rank, in
    every process and with every library version.
    """
    rng = np.random.RandomState(seed)
    blocks = [orthonormal(rng.standard_normal((d, d))).T * math.sqrt(d) for _ in range(-(-rows // d))]
    return torch.from_numpy(np.concatenate(blocks)[:rows].astype(np.float32))


GAUSSIAN_CONSTANT = math.sqrt(math.pi / 2)
"""`sphere_constant` for rows of independent normal numbers, whatever their length."""


@functools.lru_cache(maxsize=512)
def gaussian_sketch(rows: int, d: int, seed: int) -> torch.Tensor:
    """(rows, d) float32 independent normal numbers, as reproducible as those of `sketch`."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((rows, d)).astype(np.float32))


def orthonormal(a: np.ndarray) -> np.ndarray:
    """Gram-Schmidt on the columns of a square float64 matrix.

    LAPACK's QR is not used: its threads take 400 times as long on a busy machine (and at start-up every rank computes
    all sketches at once), its result depends on the machine, and its signs would have to be undone.
    """
    a = a.copy()
    for j in range(a.shape[1]):
        column = a[:, j] / math.sqrt(math.fsum(a[:, j] ** 2))
        rest = a[:, j + 1 :]
        rest -= column[:, None] * (column[:, None] * rest).sum(0)
        a[:, j] = column
    return a


MOST_NAMED = 256
"""The number of channels that a byte can distinguish."""


class SketchKeys(KeyCodec):
    name = "qjl"
    title = "sign bits of a random sketch and norms; outlier channels with their own"
    hurt_by_biases = "has an error in proportion to the norm of the whole key, its constant part included"
    options = (
        Option("m", "sign bits of QJL's inlier sketch", low=32, high=2048, multiple=32),
        Option("m_out", "sign bits of QJL's outlier sketch", low=32, high=2048, multiple=32),
        Option("outliers", "outlier channels of QJL; 0: none", low=0, high=32),
        Option("outlier_choice", "what selects them: the prompt, or each slab", "prompt", ("prompt", "slab")),
        Option(
            "sketch", "rows of QJL's sketches: orthogonal, or independent", "orthogonal", ("orthogonal", "gaussian")
        ),
        Option("seed", "seed of QJL's sketches", 42, low=0, high=2**31 - 1),
    )

    @classmethod
    def bind(cls, geometry: Geometry, options: Mapping[str, Any]) -> SketchKeys:
        return (OneSketchKeys if options["outliers"] == 0 else SketchKeys)(geometry, options)

    def __init__(self, geometry: Geometry, options: Mapping[str, Any]) -> None:
        self.d = geometry.d
        self.m = options["m"] or 2 * self.d
        self.gaussian = options["sketch"] == "gaussian"
        self.seed = (options["seed"] * 1_000_003 + 2 * geometry.layer) % 2**31
        self.scale = self._constant(self.d) / self.m
        self._divide(options)

    def _divide(self, options: Mapping[str, Any]) -> None:
        """The outliers and their sketch."""
        if self.d > MOST_NAMED:
            raise ValueError(
                f"QJL names outlier channels by bytes, so heads have at most {MOST_NAMED} channels, not {self.d}; "
                "set the kvq option 'outliers' to 0, or use klt3"
            )
        self.m_out, self.n = options["m_out"] or self.d, options["outliers"] or self.d // 16
        self.state_rows = 2 if options["outlier_choice"] == "prompt" else 0
        self.scale_out = self._constant(self.n) / self.m_out

    def _constant(self, d: int) -> float:
        return GAUSSIAN_CONSTANT if self.gaussian else sphere_constant(d)

    def _sketch(self, rows: int, d: int, seed: int) -> torch.Tensor:
        return (gaussian_sketch if self.gaussian else sketch)(rows, d, seed)

    def sketch(self, device: torch.device) -> torch.Tensor:
        return self._sketch(self.m, self.d, self.seed).to(device)

    def sketch_out(self, device: torch.device) -> torch.Tensor:
        return self._sketch(self.m_out, self.n, self.seed + 1).to(device)

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return (
            Field("k_bits", torch.uint8, key_code_shape(self.m, 1)),
            Field("k_norm", torch.float16, (SLAB,)),
            Field("ko_bits", torch.uint8, key_code_shape(self.m_out, 1)),
            Field("ko_norm", torch.float16, (SLAB,)),
            Field("ko_index", torch.uint8, (self.n,)),
        )

    def fit(self, queries: torch.Tensor, keys: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        return self.fit_sums(keys.square().sum(1), keys.shape[1], state)

    def fit_sums(self, squares: torch.Tensor, tokens: int, state: torch.Tensor | None) -> torch.Tensor:
        """The same from sums of squares (H, d) over the given number of tokens."""
        new = torch.stack([squares, torch.full_like(squares, tokens)], dim=1)
        return new if state is None else state + new

    def _choose(self, x: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Outlier channels (U, s, n) of slabs (U, s, 32, d)."""
        energy = x.square().sum(-2)
        if state is not None and self.state_rows:
            enough = state[:, 1, :1] >= SLAB
            energy = torch.where(enough.unsqueeze(1), state[:, :1], energy)
        return energy.topk(self.n, dim=-1).indices.sort(dim=-1).values

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        index = self._choose(x, state)
        at = index.unsqueeze(-2).expand(*x.shape[:-1], self.n)
        outer = x.gather(-1, at)
        inner = x.scatter(-1, at, 0.0)
        return {
            "k_bits": pack_keys(inner @ self.sketch(x.device).T >= 0, 1),
            "k_norm": half(inner.norm(dim=-1)),
            "ko_bits": pack_keys(outer @ self.sketch_out(x.device).T >= 0, 1),
            "ko_norm": half(outer.norm(dim=-1)),
            "ko_index": index,
        }

    def unpack(self, fields: Packed) -> torch.Tensor:
        """The linear reconstruction k_hat: q . k_hat is the estimator."""
        rows, at = self._rows(fields), self._index(fields)
        inner = (rows @ self.sketch(rows.device)).scatter(-1, at, 0.0)
        return inner.scatter_add(-1, at, self._outliers(fields)).flatten(1, 2)

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        """[S q, q]: the sketch once per query instead of once per key."""
        return torch.cat([query @ self.sketch(query.device).T, query], dim=-1)

    def key_features(self, fields: Packed) -> torch.Tensor:
        """[c/m |k_in| bits, e]: e holds, only at the outlier channels, k_out's estimate minus what S q sees."""
        rows, at = self._rows(fields), self._index(fields)
        columns = self.sketch(rows.device).T[fields["ko_index"].long()]  # (U, s, n, m)
        extra = self._outliers(fields) - rows @ columns.transpose(-2, -1)
        rest = torch.zeros(*rows.shape[:-1], self.d, device=rows.device).scatter(-1, at, extra)
        return torch.cat([rows, rest], dim=-1).flatten(1, 2)

    def _rows(self, fields: Packed) -> torch.Tensor:
        signs = unpack_keys(fields["k_bits"], 1).float().mul_(2).sub_(1)
        return signs * (self.scale * fields["k_norm"].float()).unsqueeze(-1)

    def _outliers(self, fields: Packed) -> torch.Tensor:
        signs = unpack_keys(fields["ko_bits"], 1).float().mul_(2).sub_(1)
        norm = (self.scale_out * fields["ko_norm"].float()).unsqueeze(-1)
        return (signs @ self.sketch_out(signs.device)) * norm

    def _index(self, fields: Packed) -> torch.Tensor:
        index = fields["ko_index"].long().unsqueeze(-2)
        return index.expand(*index.shape[:-2], SLAB, self.n)


class OneSketchKeys(SketchKeys):
    """`outliers`: 0. One sketch of all channels."""

    def _divide(self, options: Mapping[str, Any]) -> None:
        for option in self.options:
            if option.name in ("m_out", "outlier_choice") and options[option.name] != option.default:
                raise ValueError(f"option {option.name!r} is set, but it has no effect with 'outliers' 0")
        self.m_out = self.n = 0
        self.scale_out = 0.0

    @property
    def slab_fields(self) -> tuple[Field, ...]:
        return super().slab_fields[:2]

    def pack(self, x: torch.Tensor, state: torch.Tensor | None) -> Packed:
        x = x.unflatten(1, (-1, SLAB))
        return {"k_bits": pack_keys(x @ self.sketch(x.device).T >= 0, 1), "k_norm": half(x.norm(dim=-1))}

    def unpack(self, fields: Packed) -> torch.Tensor:
        rows = self._rows(fields)
        return (rows @ self.sketch(rows.device)).flatten(1, 2)

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        return query @ self.sketch(query.device).T

    def key_features(self, fields: Packed) -> torch.Tensor:
        return self._rows(fields).flatten(1, 2)


FORMATS = (Format("qjl3", "QJL, sign sketches", SketchKeys, TokenValues, {"W": 128}),)
