"""The record: one vLLM block of N tokens of one KV head, self-contained.

    header   64 bytes   i32 magic, i32 position of the page's first token if the stored form of keys depends on
                        it (else 0), 8 bytes unused, then one byte per slab: 1 when the slab is packed (N <= 1024)
    page fields         what the codecs store once per page (PolarQuant's grids, InnerQ's norm)
    slab 0 .. N/32 - 1  key fields, then value fields of 32 tokens: one contiguous run, which is written at once and
                        which a GPU can copy in bulk

Fields lie on 64-byte boundaries, records on 128-byte ones. A fresh block reads as zeros, so an unpacked slab is
recognised by its flag, and reading one raises an error instead of returning garbage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from vllm_kvq.formats.codec import LARGEST_BLOCK, Codec, Geometry, KeyCodec, ValueCodec
from vllm_kvq.formats.constants import Calibration, Constants, Moments
from vllm_kvq.formats.parts.fields import Packed, Region, round_up
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.quant import sanitize
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.parts.turning import Turning
from vllm_kvq.formats.settings import Settings

MAGIC = 0x3151564B  # "KVQ1"
HEADER_BYTES = 64
POSITION_AT = 4
FLAGS_AT = 16
assert LARGEST_BLOCK // SLAB <= HEADER_BYTES - FLAGS_AT


def _packed(codec: Codec, x: torch.Tensor, state: torch.Tensor | None, decoded: torch.Tensor | None) -> Packed:
    fields = codec.pack(x, state)
    if not codec.tells_decode or decoded is None or not decoded.any():
        return fields
    others = codec.pack_decoded(x, state)
    return {
        name: torch.where(decoded.view(-1, *[1] * (old.dim() - 1)), others[name], old) for name, old in fields.items()
    }


@dataclass(frozen=True)
class PageFormat:
    """A format bound to a head geometry: everything that kernels and the integration need to know about it."""

    name: str
    geometry: Geometry
    settings: Settings
    keys: KeyCodec
    values: ValueCodec

    def __post_init__(self) -> None:
        if self.S > self.N:
            raise ValueError(f"option 'S' is {self.S}; sinks must fit in one page of {self.N} tokens")
        if self.W_keys > self.W:
            raise ValueError(f"option 'W_keys' is {self.W_keys}, more than 'W', {self.W}, the window of the values")

    @property
    def calibrated(self) -> bool:
        return self.keys.calibrated or self.values.calibrated

    def with_constants(self, constants: Constants | None) -> PageFormat:
        """The same format for a layer with these constants."""
        geometry, s = replace(self.geometry, constants=constants), self.settings
        keys, values = s.keys.bind(geometry, s.of_codec(s.keys)), s.values.bind(geometry, s.of_codec(s.values))
        return replace(self, geometry=geometry, keys=keys, values=values)

    def calibrated_on(self, calibration: Calibration) -> PageFormat:
        """The same format with constants fitted to a layer's calibration text; itself if it is not calibrated."""
        if not self.calibrated:
            return self
        s = self.settings
        keys, values = (
            codec.fit_constants(calibration, s.of_codec(codec)) if codec.calibrated else None
            for codec in (s.keys, s.values)
        )
        return self.with_constants(Constants(keys, values))

    def fitted_to(self, moments: Moments, turning: Turning | None = None) -> Constants:
        """The constants of a layer with these sums, the same for all options of the codecs."""
        halves = self.keys, self.values
        return Constants(*(codec.fit_moments(moments, turning) if codec.calibrated else None for codec in halves))

    # -- sizes ---------------------------------------------------------------------------------------------------
    @property
    def N(self) -> int:
        return self.geometry.block_size

    @property
    def slabs(self) -> int:
        return self.N // SLAB

    @property
    def unit(self) -> int:
        """P: the number of tokens that are packed together."""
        return self.N if self.keys.page_wide or self.values.page_wide else SLAB

    @property
    def W(self) -> int:
        """The full-precision window, rounded up to whole pack units."""
        return round_up(self.settings.W, self.unit)

    @property
    def W_keys(self) -> int:
        """The window of the keys, at most W: between the two windows packed keys go with values in full precision."""
        return self.W if self.settings.W_keys is None else round_up(self.settings.W_keys, self.unit)

    @property
    def reference_only(self) -> str | None:
        """Why it can be measured but not served, in a sentence for users; None: it can be served."""
        if self.W_keys < self.W:
            return (
                f"option 'W_keys' is served only as large as W, {self.W}; a shorter window of keys, which saves no "
                "memory, is for vllm_kvq.roundtrip and the evaluation"
            )
        return self.keys.reference_only or self.values.reference_only

    @property
    def S(self) -> int:
        return self.settings.S

    @property
    def state_rows(self) -> int:
        return self.keys.state_rows

    @property
    def rope(self) -> Rope | None:
        """The RoPE that is undone on keys to be packed and applied again to keys that are read; None: no RoPE."""
        return self.geometry.rope if self.keys.before_rope else None

    @property
    def placed(self) -> bool:
        """Whether pages hold the position of their first token, by which keys are packed and read."""
        return self.rope is not None or self.keys.placed

    @property
    def page_region(self) -> Region:
        return Region.of(self.keys.page_fields + self.values.page_fields)

    @property
    def slab_region(self) -> Region:
        return Region.of(self.keys.slab_fields + self.values.slab_fields)

    @property
    def slabs_at(self) -> int:
        return HEADER_BYTES + self.page_region.nbytes

    @property
    def record_bytes(self) -> int:
        return round_up(self.slabs_at + self.slabs * self.slab_region.nbytes, 128)

    @property
    def bits_per_element(self) -> float:
        """Everything counted: codes, parameters, header, alignment and head padding."""
        return self.record_bytes * 8 / (2 * self.N * self.geometry.head_size)

    # -- tensors -------------------------------------------------------------------------------------------------
    def widen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., head_size) of any dtype -> finite float32 (..., d), and the number of elements that were replaced."""
        clean, replaced = sanitize(x)
        return torch.nn.functional.pad(clean, (0, self.geometry.d - self.geometry.head_size)), replaced

    def pack(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        state: torch.Tensor | None,
        decoded: torch.Tensor | None = None,
        position: torch.Tensor | None = None,
    ) -> Packed:
        """Widened (U, T, d) keys and values of one pack unit each -> all fields.

        decoded (U,) booleans: a decode step has completed the unit; None: prompts have completed all of them.
        position (U,) of each unit's first token: needed, and stored, only by formats that are `placed`.
        """
        placed: Packed = {}
        if self.placed:
            if position is None:
                raise ValueError(f"{self.name} stores keys by their positions, and needs to know them")
            key = self.before_rope(key, position[:, None] + torch.arange(key.shape[1], device=key.device))
            if self.keys.placed:
                key = key - self.keys.mean_at(position, key.shape[1])
            placed = {"position": position}
        return {**_packed(self.keys, key, state, decoded), **_packed(self.values, value, None, decoded), **placed}

    def before_rope(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Keys or queries (..., d) as the key codec expects them; `position` broadcasts to their leading dimensions."""
        return x if self.rope is None else self.rope.undo(x, position)

    def unpack(self, fields: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """All fields -> (U, T, d) keys and values."""
        return self._after_rope(self.keys.unpack(fields), fields), self.values.unpack(fields)

    def query_features(self, query: torch.Tensor) -> torch.Tensor:
        """f(q) with q . key == f(q) . g(page); (..., KV heads, rows, d) -> (..., F)."""
        return self.keys.query_features(query) if self.rope is None else query

    def key_features(self, fields: Packed) -> torch.Tensor:
        """g(page). If RoPE must still be applied to keys, no f(q) serves a page's tokens: they are read as keys."""
        if self.rope is None:
            return self.keys.key_features(fields)
        return self._after_rope(self.keys.unpack(fields), fields)

    def _after_rope(self, key: torch.Tensor, fields: Packed) -> torch.Tensor:
        if self.rope is None:
            return key
        return self.rope.apply(key, fields["position"][:, None] + torch.arange(key.shape[1], device=key.device))

    def _slab_view(self, pages: torch.Tensor) -> torch.Tensor:
        """(B, H, record_bytes) -> (B, H, slabs, slab bytes), a view."""
        size = self.slab_region.nbytes
        return pages[..., self.slabs_at : self.slabs_at + self.slabs * size].unflatten(-1, (self.slabs, size))

    def write(self, pages: torch.Tensor, page: torch.Tensor, unit: torch.Tensor, fields: Packed) -> None:
        """Store n pack units, fields of leading size n * H: unit `unit[i]` of page `page[i]` of (B, H, bytes)."""
        n, heads, per_unit = len(page), pages.shape[1], self.unit // SLAB
        shape = {k: v.unflatten(0, (n, heads)) for k, v in fields.items()}
        slabs = torch.zeros(n, heads, per_unit, self.slab_region.nbytes, dtype=torch.uint8, device=pages.device)
        self.slab_region.write(slabs, shape)
        slab = unit[:, None] * per_unit + torch.arange(per_unit, device=pages.device)
        self._slab_view(pages)[page[:, None], :, slab] = slabs.transpose(1, 2)
        if self.page_region.nbytes:
            extra = torch.zeros(n, heads, self.page_region.nbytes, dtype=torch.uint8, device=pages.device)
            self.page_region.write(extra, shape)
            pages[..., HEADER_BYTES : self.slabs_at][page] = extra
        pages[..., :4].view(torch.int32)[page] = MAGIC
        if self.placed:
            first = shape["position"] - unit[:, None] * self.unit
            pages[..., POSITION_AT : POSITION_AT + 4].view(torch.int32)[page] = first.unsqueeze(-1).int()
        pages[..., FLAGS_AT : FLAGS_AT + self.slabs][page[:, None], :, slab] = 1

    def read(self, pages: torch.Tensor, page: torch.Tensor) -> Packed:
        """All fields of n whole pages, leading size n * H."""
        data = pages[page].flatten(0, 1)
        slabs = data[:, self.slabs_at : self.slabs_at + self.slabs * self.slab_region.nbytes]
        fields = {**self.slab_region.read(slabs.unflatten(-1, (self.slabs, -1))), **self.read_page_fields(data)}
        if self.placed:
            fields["position"] = data[:, POSITION_AT : POSITION_AT + 4].contiguous().view(torch.int32)[:, 0]
        return fields

    def read_page_fields(self, data: torch.Tensor) -> Packed:
        return self.page_region.read(data[..., HEADER_BYTES : self.slabs_at])

    def packed_slabs(self, pages: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """(n, slabs) booleans: which slabs of these pages hold data."""
        head = pages[page, 0, :HEADER_BYTES].contiguous()
        return (head[:, FLAGS_AT : FLAGS_AT + self.slabs] == 1) & (head[:, :4].view(torch.int32) == MAGIC)

    def half_bits_per_element(self, half: Literal["keys", "values"]) -> float:
        """The fields of one half only, without header and alignment."""
        codec = self.keys if half == "keys" else self.values
        size = sum(f.nbytes for f in codec.slab_fields) * self.slabs + sum(f.nbytes for f in codec.page_fields)
        return size * 8 / (self.N * self.geometry.head_size)
