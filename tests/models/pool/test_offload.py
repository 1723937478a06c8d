"""Packed pages that were kept in the host's memory: prefix hits on them give the same tokens as hits in the pool."""

from __future__ import annotations

import functools
import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab import Lab, smallest_pages
from offload import Store, copied, copy_at_once

from proof.models import named
from proof.oracle.engines.forked import EngineFailed, EngineProcess
from proof.oracle.trace import Request, Trace
from vllm_kvq.formats import get_format
from vllm_kvq.integration.plan.connectors import KNOWN, LAYER_BY_LAYER, ONE_TABLE, REFUSED, SEVERAL

pytestmark = pytest.mark.engine
N = 32
ENGINE: dict[str, Any] = {
    "block_size": N,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "skip_tokenizer_init": True,
}


def connector(name: str = "SimpleCPUOffloadConnector") -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    extra = {"cpu_bytes_to_use": 1 << 28}
    how = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": how, "before": copy_at_once}


BY_SIZE = {"kv_offloading_size": 0.25, "before": copy_at_once}


def todo(reset: bool) -> list[Trace]:
    """A long prompt; two that begin like it, after the pool has forgotten all; and one whose first blocks are in the
    pool again."""
    rng = random.Random(1)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, 512) for _ in range(count))

    shared, tail, end = words(160), words(40), words(5)
    return [
        Trace((Request("cold", shared + tail, 24),)),
        Trace((Request("other", words(9), 4),)),
        Trace((Request("begins alike", shared + end, 24), Request("same", shared + tail, 24, arrival=3)), reset=reset),
        Trace((Request("first blocks", shared[:70] + end, 4),), reset=reset),
        Trace((Request("the rest", shared + end, 24),)),
    ]


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lossless": ("Llama", "lossless", {"W": 32, "S": 4}),
    # a page that a request computes after a hit is fitted to that request: here no request does
    "squat2": ("Llama", "squat2", {"recompute": 0}),
    "innerq2": ("Llama", "innerq2", {"recompute": 0, "S": 8}),  # its sinks are on two pages
    "klt3": ("Llama", "klt3", {"recompute": 0}),
    "windows": ("gpt-oss", "lossless", {"W": 32, "S": 4}),
    "pages of 32 tokens for windows": ("Gemma-3", "lossless", {"W": 32, "S": 4, "N": 64}),
    "chunks": ("Llama 4", "lossless", {"W": 32, "S": 4}),
    "states": ("Granite 4", "lossless", {"W": 32, "S": 4}),
    "several connectors": ("Llama", "lossless", {"W": 32, "S": 4}),
}
WIDE = ("klt3", "windows", "pages of 32 tokens for windows", "chunks")


def copy_small_pages() -> None:
    smallest_pages()
    copy_at_once()


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.wide if c in WIDE else ()) for c in CASES])
def test_hits_from_the_host_give_the_same_tokens(case: str, lab: Lab, model: Path) -> None:
    name, format_name, options = CASES[case]
    arch = named(name)
    # constants are fitted to a text, for which there has to be a tokenizer
    checkpoint = str(model if get_format(format_name).settings().calibrated else lab.model(arch))
    engine = {**ENGINE, "dtype": arch.dtype, "kv_cache_dtype": format_name, "additional_config": {"kvq": options}}
    if "N" in options:
        del engine["block_size"]
    with EngineProcess(checkpoint, engine, {}) as process:
        expected = [process.run(trace) for trace in todo(reset=False)]
    # the flag is another way to the same connector
    offloading = {"squat2": BY_SIZE, "several connectors": several(KNOWN, KNOWN)}.get(case) or connector()
    if "N" in options:
        offloading["before"] = copy_small_pages
    with EngineProcess(checkpoint, {**engine, **offloading}, {}) as process:
        got, loaded = [], []
        for trace in todo(reset=True):
            got.append(process.run(trace))
            loaded.append(process.call(copied)["loaded"])
    for there, here in zip(expected, got, strict=True):
        assert here.outputs == there.outputs
    cached = {request: tokens for result in got for request, tokens in result.cached.items()}
    assert cached["the rest"] == expected[4].cached["the rest"] > 0
    assert cached["same"] == expected[2].cached["same"] > 0
    # blocks came from the host in the third trace
    assert 0 == loaded[0] < loaded[2]
    if name == "Llama":  # of windows and states vLLM keeps what the end of a prompt sees
        assert cached["begins alike"] == cached["the rest"]
        # and the rest of a prefix in the last one
        assert loaded[3] < loaded[4]


# -- which connectors, and whose pages they may find ------------------------------------------------------------------
def several(*names: str) -> dict[str, Any]:
    """MultiConnector with these."""
    how = connector("MultiConnector")
    extra = {"cpu_bytes_to_use": 1 << 27}
    how["kv_transfer_config"].kv_connector_extra_config = {
        "connectors": [{"kv_connector": n, "kv_role": "kv_both", "kv_connector_extra_config": extra} for n in names]
    }
    return how


def test_every_connector_of_vllms_is_allowed_or_refused_by_name(lab: Lab) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert {*REFUSED, KNOWN, SEVERAL} == {*KVConnectorFactory._registry}
    model = lab.model(named("Llama"))
    for name, reason in REFUSED.items():
        said = lab.refusal(model, kv_cache_dtype="squat2", kv_transfer_config=connector(name)["kv_transfer_config"])
        assert said is not None
        if name == "HiSparseConnector" and "HiSparse currently requires NVIDIA CUDA" in said:
            continue  # vLLM refuses it first
        assert f"does not support the KV connector {name}, which {reason}; drop --kv-transfer-config" in said
        assert "or use SimpleCPUOffloadConnector on a GPU" in said


@pytest.mark.parametrize("name", ["MultiConnector", "somebody's"])
def test_what_a_connector_hides_is_refused_too(name: str, lab: Lab) -> None:
    if name == "MultiConnector":
        how, sentence = several(KNOWN, "OffloadingConnector"), REFUSED["OffloadingConnector"]
    else:
        how, sentence = connector(KNOWN), "KV connector SimpleCPUOffloadConnector of theirs, which has not been tried"
        how["kv_transfer_config"].kv_connector_module_path = "theirs"
    said = lab.refusal(lab.model(named("Llama")), kv_cache_dtype="squat2", kv_transfer_config=how["kv_transfer_config"])
    assert said is not None
    assert sentence in said


def test_the_reasons_are_true() -> None:
    """The reasons for those that can be imported here."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    from vllm_kvq.integration.core.spec import SinkSpec

    place: Any = scheduler
    if not hasattr(place, "get_sliding_window_size_in_chunks"):  # 0.33 has it elsewhere
        place = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config")
    for name in (name for name, reason in REFUSED.items() if reason.startswith(ONE_TABLE)):
        assert not supports_hma(KVConnectorFactory.get_connector_class_by_name(name)), name
    sinks = SinkSpec.__new__(SinkSpec)
    with pytest.raises(AssertionError):
        place.get_sliding_window_size_in_chunks(sinks, 32)


def allow() -> None:
    """All connectors, in this process."""
    from vllm_kvq.integration.plan import refusals

    refusals.connector_problem = lambda vllm_config: None


def allow_several_tables() -> None:
    """And ExampleConnector says of itself that it knows several block tables."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    allow()
    SupportsHMA.register(ExampleConnector)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (allow, "Failed to promote local KV cache specs to one unified type"),
        pytest.param(allow_several_tables, "in extract_kv_from_layer", marks=pytest.mark.wide),
    ],
)
def test_example_connector_fails_for_the_reasons_given(before: Any, said: str, lab: Lab, tmp_path: Path) -> None:
    """With packed pages no engine starts; if what prevents it is lifted, too, the connector stops at the first page, in
    which it looks for a token. (It does serve a 16-bit cache, also on a CPU.)"""
    from vllm.config import KVTransferConfig

    extra = {"shared_storage_path": str(tmp_path)}
    how = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    arch = named("Llama")
    engine = {**ENGINE, "dtype": arch.dtype, "kv_cache_dtype": "lossless", "additional_config": {"kvq": {"W": 32}}}
    engine |= {"kv_transfer_config": how, "before": before}
    with pytest.raises(EngineFailed, match=said), EngineProcess(str(lab.model(arch)), engine, {}) as process:
        process.run(todo(reset=False)[0])


def test_pages_that_lie_layer_by_layer_stop_nixl_and_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from vllm.distributed.kv_transfer.kv_connector import utils
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    from vllm_kvq.integration.core.spec import PackedSpec
    from vllm_kvq.integration.worker.layout import ONE_SIZE

    assert {name for name, reason in REFUSED.items() if reason == LAYER_BY_LAYER} == {
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
    for worker in (MooncakeConnectorWorker, NixlBaseConnectorWorker):
        assert "get_current_attn_backends_and_specs(" in inspect.getsource(worker._sync_block_size_with_kernel)
    spec = PackedSpec.__new__(PackedSpec)
    object.__setattr__(spec, "tokens_per_state", N)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["packed"])
    monkeypatch.setattr(utils, "get_layers_from_vllm_config", lambda *_: {"packed": None})
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: ONE_SIZE[0])
    with pytest.raises(AssertionError, match="Compressed caches must be packed"):
        utils.get_current_attn_backends_and_specs(
            SimpleNamespace(cache_config=cache), SimpleNamespace(transfer_groups=[group]), []
        )


def test_a_store_of_mooncakes_asks_every_group_for_the_end_of_a_hit() -> None:
    """Three blocks of a hit: the packed group has them all, and sinks the first."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import ExternalCachedBlockPool
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    hashes = [b"first", b"second", b"third"]

    def ends(*groups: list[bytes]) -> Any:
        spec = SimpleNamespace(prefix_cacheable=True)
        worker = SimpleNamespace(
            hash_block_size=N,
            token_dbs=[SimpleNamespace(block_size=N)] * len(groups),
            _kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * len(groups),
            coord=SimpleNamespace(enable_partial_hash_hits=False),
        )
        there = {(group, found) for group, stored in enumerate(groups) for found in stored}
        return MooncakeStoreWorker._tail_key_boundaries(worker, hashes, 3 * N, ExternalCachedBlockPool(N, there))

    assert [end.group_id for end in ends(hashes, hashes)] == [0, 1]
    with pytest.raises(AssertionError):
        ends(hashes, hashes[:1])


def test_a_store_that_servers_share_gives_nobody_pages_of_other_options(lab: Lab) -> None:
    """Two servers with W=32 and one with W=64: pages and keys of the first are put where the others look."""
    arch = named("Llama")
    cold, *_ = todo(reset=False)

    def served(window: int, pages: list[Any] | None = None) -> tuple[Any, int, list[Any]]:
        engine = {**ENGINE, "dtype": arch.dtype, "kv_cache_dtype": "lossless", **connector()}
        engine["additional_config"] = {"kvq": {"W": window, "S": 4}}
        with EngineProcess(str(lab.model(arch)), engine, {}) as process:
            if pages:
                process.call(functools.partial(Store.put, pages))
            result = process.run(cold)
            process.run(todo(reset=False)[1])  # what is copied is noted in a later step
            return result, process.call(copied)["loaded"], process.call(Store.take)

    first, _, pages = served(32)
    assert len(pages) >= 200 // N
    alike, loaded, _ = served(32, pages)
    assert loaded > 0
    assert alike.cached["cold"] > 0
    other, loaded, both = served(64, pages)
    assert loaded == 0
    assert other.cached["cold"] == 0
    assert len({key for key, *_ in both}) > len({key for key, *_ in pages}), "it stored pages of its own, too"
    assert first.outputs == alike.outputs == other.outputs


def block_hashes(traced: Any) -> set[bytes]:
    """The hashes of all blocks that the pool of an engine finds again."""
    core = traced.engine.engine_core.engine_core
    found = core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    return {bytes(key[:-4]) for key in found}


def test_engines_with_other_options_never_find_each_others_pages(lab: Lab) -> None:
    """The keys of connectors that are allowed follow from blocks' hashes. Without a connector hashes are vLLM's own."""
    arch = named("Llama")
    trace = todo(reset=False)[0]

    def hashes(name: str, options: dict[str, Any], **more: Any) -> set[bytes]:
        engine = {**ENGINE, "dtype": arch.dtype, "kv_cache_dtype": name, **more}
        if options:
            engine["additional_config"] = {"kvq": options}
        with EngineProcess(str(lab.model(arch)), engine, {}) as process:
            process.run(trace)
            found = process.call(block_hashes)
        assert len(found) >= 200 // N
        return found

    vllms = hashes("auto", {})
    assert hashes("lossless", {"W": 32}) == hashes("lossless", {"W": 64}) == vllms
    kept = [hashes("lossless", {"W": window}, **connector()) for window in (32, 64, 32)]
    through_several = hashes("lossless", {"W": 32}, **several(KNOWN))
    assert kept[0] == kept[2] == through_several
    assert kept[0].isdisjoint(kept[1])
    assert kept[0].isdisjoint(vllms)
    assert kept[1].isdisjoint(vllms)


def test_a_cpu_has_nothing_to_offload(lab: Lab) -> None:
    how = connector()["kv_transfer_config"]
    said = lab.refusal(lab.model(named("Llama")), kv_cache_dtype="squat2", kv_transfer_config=how)
    assert said is not None
    assert "does not support KV connectors; drop --kv-transfer-config" in said
    assert "SimpleCPUOffloadConnector copies only on GPUs" in said
