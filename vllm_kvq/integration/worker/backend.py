"""The attention backend: what vLLM calls for every layer whose cache is ours."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvq.formats import FORMATS, Geometry, PageFormat
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.integration import compat
from vllm_kvq.integration.core.spec import PackedSpec
from vllm_kvq.integration.patches import registry
from vllm_kvq.integration.patches.patch import Moment
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.plan.refusals import check_layer
from vllm_kvq.integration.worker.binding import bind_layer, layer_of
from vllm_kvq.integration.worker.faults import FaultWatch
from vllm_kvq.integration.worker.layer import PackedLayer
from vllm_kvq.integration.worker.layout import ONE_SIZE, SIDE_BY_SIDE
from vllm_kvq.integration.worker.report import Damage
from vllm_kvq.integration.worker.sharing import SharingLayer, check_sharing
from vllm_kvq.kernels.gpu.step import GPUStep
from vllm_kvq.kernels.paths import Wish
from vllm_kvq.kernels.step import StepBatch
from vllm_kvq.problem import Refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


@dataclass
class KVQMetadata:
    """What vLLM says of a step to the packed layers of one KV cache group."""

    query_start: torch.Tensor
    """On the host."""
    device_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    longest: int
    """New tokens of the request that has the most."""
    batch: StepBatch | None = None

    def joined(self, tables: Any, packed: PackedLayer) -> StepBatch:
        """With the block tables of the companions, which are in groups of their own: made by the first layer."""
        if self.batch is None:
            self.batch = StepBatch(
                self.query_start,
                self.device_start,
                self.seq_lens,
                self.block_table,
                tables[packed.sidecar_name].block_table,
                None if packed.sink_name is None else tables[packed.sink_name].block_table,
                self.longest,
            )
        return self.batch


class KVQMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: PackedSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.block_size != kv_cache_spec.tokens_per_state:
            raise RuntimeError("vLLM enlarged the packed layers' blocks to the pages of other layers")
        # decodes and verified drafts first, prompts after them: on the GPU's path each kind has its own launch
        if Wish.of(device.type, os.environ).on_gpu:
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.watches: list[FaultWatch] | None = None
        registry.install(Moment.BUILT, vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: PackedSpec) -> AttentionCGSupport:
        """On the GPU's path decode and verification steps decide everything on the device; prompts are attended outside
        of graphs."""
        return AttentionCGSupport.UNIFORM_BATCH if plan(vllm_config).path.on_gpu else AttentionCGSupport.NEVER

    def _watch(self) -> None:
        if self.watches is None:
            layers = self.vllm_config.compilation_config.static_forward_context
            packed = [getattr(layers[name].impl, "packed", None) for name in self.layer_names]
            steps = {id(p.step): (p.step, p) for p in packed if p is not None}
            self.watches = [
                FaultWatch(step, Damage("packed layers", p.damage.export))
                for step, p in steps.values()
                if isinstance(step, GPUStep)
            ]
        for watch in self.watches:
            watch.poll()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KVQMetadata:
        m = common_attn_metadata
        self._watch()
        return KVQMetadata(m.query_start_loc_cpu, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.max_query_len)


class KVQBackend(AttentionBackend):
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = list(FORMATS)
    format: PageFormat | None = None
    """Set in the subclass of each layer: `customize_spec` sees only the spec, without a vLLM configuration."""
    recomputed: int = 0
    """The same for `Served.recomputed`."""
    mixed: bool = False
    """The same for `Served.mixed`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the one name that survives pickling to workers

    @staticmethod
    def get_impl_cls() -> type[KVQImpl]:
        return KVQImpl

    @staticmethod
    def get_builder_cls() -> type[KVQMetadataBuilder]:
        return KVQMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(SLAB)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return SIDE_BY_SIDE if cls.mixed else ONE_SIZE

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """One opaque record per block and KV head instead of K and V per token."""
        if not isinstance(spec, FullAttentionSpec):
            raise Refused(
                f"low-bit KV cache formats do not support {type(spec).__name__} layers; use --kv-cache-dtype auto"
            )
        if cls.format is None:
            raise RuntimeError("a packed layer was asked for its page size before its weights were loaded")
        if spec.block_size != cls.format.N:
            raise RuntimeError(
                f"vLLM changed the block size to {spec.block_size} after the format was bound to {cls.format.N}"
            )
        return replace_as(
            spec,
            PackedSpec,
            tokens_per_state=spec.block_size,
            state_content_bytes=cls.format.record_bytes,
            recomputed=cls.recomputed,
        )


@functools.cache
def bound_backend(fmt: PageFormat, recomputed: int, mixed: bool) -> type[KVQBackend]:
    return type("KVQBackend", (KVQBackend,), {"format": fmt, "recomputed": recomputed, "mixed": mixed})


class KVQImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        self.learned = extra.pop("sinks", None)
        self.target_name = kv_sharing_target_layer_name
        check_layer(alibi_slopes, sliding_window, attn_type, extra)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.cap = float(logits_soft_cap or 0.0)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.vllm_config = get_current_vllm_config()
        if problem := compat.worker_problem(self.vllm_config):
            raise Refused(str(problem))
        self.packed: PackedLayer | None = None
        self.sharing: SharingLayer | None = None
        """In place of `packed`, in a layer that shares another's cache."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Bind the format and create the companions; the layer has its name by now."""
        if self.packed is not None or self.sharing is not None:
            return  # weights were loaded again: caches and companions are bound already
        layers = self.vllm_config.compilation_config.static_forward_context
        name, layer = layer_of(self.vllm_config, self)
        index = _layer_index(name)
        if self.target_name is not None:
            target = layers[self.target_name]
            served = plan(self.vllm_config)
            check_sharing(index, self, self.target_name, target.impl, served.layers)
            target.impl.process_weights_after_loading(act_dtype)
            layer.attn_backend = target.attn_backend
            self.sharing = SharingLayer.create(name, target.impl.packed, self.scale, self.vllm_config, served, self.cap)
            return
        served = plan(self.vllm_config)
        geometry = Geometry(self.head_size, served.format.N, act_dtype, index)
        fmt = bind_layer(served.options, self.vllm_config.model_config, geometry)
        registry.install(Moment.LOADED, self.vllm_config)
        layer.attn_backend = bound_backend(fmt, served.recomputed, served.mixed)
        self.packed = PackedLayer.create(
            fmt, name, self.num_kv_heads, self.scale, self.vllm_config, served, layers, self.learned, self.cap
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KVQMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise Refused("low-bit KV cache formats do not fuse output quantization; disable that compilation pass")
        if attn_metadata is None:  # profiling and warm-up
            return output.fill_(0)
        packed = self.packed if self.sharing is None else self.sharing.target
        if packed is None:
            raise RuntimeError(
                "the sidecar companion of this layer is missing: process_weights_after_loading did not run"
            )
        batch = attn_metadata.joined(get_forward_context().attn_metadata, packed)
        out = output.view(-1, self.num_heads, self.head_size)
        if self.sharing is None:
            packed.run(batch, query, key, value, kv_cache, out)
        else:
            self.sharing.run(batch, query, out)
        return output


def _layer_index(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(name)
