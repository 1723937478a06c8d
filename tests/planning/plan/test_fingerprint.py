"""The fingerprint: another one whenever pages mean something else, and the same whenever they do not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_arguments import kvq

from vllm_kvq.formats import Geometry, get_format
from vllm_kvq.formats.constants import Constants
from vllm_kvq.integration import platform
from vllm_kvq.integration.plan import fingerprint
from vllm_kvq.integration.plan.connectors import store_problem
from vllm_kvq.integration.plan.plan import apply, plan, with_calibration
from vllm_kvq.problem import Refused

pytestmark = pytest.mark.engine
Bare = Callable[..., Any]
SQUAT = {"kv_cache_dtype": "squat2"}

OTHERS: dict[str, dict[str, Any]] = {
    "another format": {"kv_cache_dtype": "squat4"},
    "W": {**SQUAT, **kvq(W=64)},
    "S": {**SQUAT, **kvq(S=8)},
    "N": {**SQUAT, **kvq(N=64)},
    "--block-size": {**SQUAT, "block_size": 64},
    "r": {**SQUAT, **kvq(r=8)},
    "r in one layer": {**SQUAT, **kvq(r={"0": 8, "*": 16})},
    "r in the other": {**SQUAT, **kvq(r={"1": 8, "*": 16})},
    "recompute": {**SQUAT, **kvq(recompute=0)},
    "skip_layers": {**SQUAT, **kvq(skip_layers=[1])},
    "another skip_layers": {**SQUAT, **kvq(skip_layers=[0])},
    "another codec": {**SQUAT, **kvq(values="innerq")},
    "a seed": {"kv_cache_dtype": "qjl3"},
    "another seed": {"kv_cache_dtype": "qjl3", **kvq(seed=1)},
    "dtype": {**SQUAT, "dtype": "float32"},
    "another model": {**SQUAT, "model": "Llama"},
    "another revision": {**SQUAT, "revision": "v2"},
    "quantized weights": {**SQUAT, "quantization": "fp8"},
    "a draft": {**SQUAT, "draft": "draft_model"},
}

THE_SAME: dict[str, dict[str, Any]] = {
    "defaults written out": {**SQUAT, **kvq(W=32, S=4)},
    "length": {**SQUAT, "max_model_len": 128},
    "ranks": {**SQUAT, "tensor_parallel_size": 2},
    "ngram": {**SQUAT, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "eager": {**SQUAT, "enforce_eager": True},
}


def test_other_pages_have_another_one(bare: Bare) -> None:
    found = {name: plan(bare(**arguments)).fingerprint for name, arguments in {"plain": SQUAT, **OTHERS}.items()}
    assert found.pop("--block-size") == found["N"]
    assert len({*found.values()}) == len(found)
    assert all(len(one) == 12 and int(one, 16) >= 0 for one in found.values())


@pytest.mark.parametrize("case", THE_SAME)
def test_the_same_pages_have_the_same(case: str, bare: Bare) -> None:
    assert plan(bare(**THE_SAME[case])).fingerprint == plan(bare(**SQUAT)).fingerprint


def test_kernels_make_no_difference(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = plan(bare(**SQUAT))
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    slow = plan(bare(**SQUAT))
    assert fast.path.name != slow.path.name
    assert fast.fingerprint == slow.fingerprint


def test_two_ways_to_skip_a_layer_are_one(bare: Bare) -> None:
    ours, vllms = bare(**SQUAT, **kvq(skip_layers=[-1])), bare(**SQUAT, kv_cache_dtype_skip_layers=["1"])
    assert plan(ours).fingerprint == plan(vllms).fingerprint


def test_the_models_configuration_counts(model: Path, bare: Bare) -> None:
    """The same folder with another file: what only weights say is not seen."""
    before = plan(bare(**SQUAT)).fingerprint
    path = model / "config.json"
    text = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 0.125}))
        assert plan(bare(**SQUAT)).fingerprint != before
        path.write_text(json.dumps(json.loads(text) | {"transformers_version": "0.0"}))
        assert plan(bare(**SQUAT)).fingerprint == before
    finally:
        path.write_text(text)


@pytest.mark.parametrize("name", [None, "Gemma-3", "Granite 4"])
def test_every_process_says_the_same(name: str | None, configured: Bare) -> None:
    """The configuration that a worker gets is finished, and vLLM changes it after we have seen it."""
    vllm_config = configured(**SQUAT, max_model_len=512, **({} if name is None else {"model": name}))
    seen = plan(vllm_config)
    worker = pickle.loads(pickle.dumps(vllm_config))
    assert plan(worker) is not seen
    assert plan(worker).fingerprint == seen.fingerprint


def test_the_layout_and_constants_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of another layout, or with other constants, mean something else."""
    fmt = get_format("squat2").bind(Geometry(64, 64), {})
    before = fingerprint.format_meaning(fmt)
    monkeypatch.setattr(fingerprint, "MAGIC", fingerprint.MAGIC + 1)
    later = fingerprint.format_meaning(fmt)
    ones, twos = (Constants(torch.full((2, 4), x), None) for x in (1.0, 2.0))
    fitted = [
        fingerprint.format_meaning(replace(fmt, geometry=replace(fmt.geometry, constants=c))) for c in (ones, twos)
    ]
    alike = fingerprint.format_meaning(replace(fmt, geometry=replace(fmt.geometry, constants=ones)))
    assert len({fingerprint.digest(x) for x in (before, later, *fitted)}) == 4
    assert alike == fitted[0]


def test_a_connector_is_told(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvq.integration.plan import connectors

    monkeypatch.setattr(connectors, "can_copy", lambda platform: True)
    vllm_config = bare(**SQUAT, kv_offloading_size=0.25)
    served = plan(vllm_config)
    vllm_config.cache_config.kv_offloading_size = 0.25
    for _ in range(2):
        apply(served, vllm_config)
        told = vllm_config.kv_transfer_config.kv_connector_extra_config
        assert told["kvq_fingerprint"] == served.fingerprint
        assert told["cpu_bytes_to_use"] == 1 << 28
    without = bare(**SQUAT)
    apply(plan(without), without)
    assert without.kv_transfer_config is None


def transfer(named: str | None = None, nested: bool = False) -> Any:
    from vllm.config import KVTransferConfig

    one = {"cpu_bytes_to_use": 1 << 28, **({"kvq_fingerprint": named} if named else {})}
    known = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": one}
    if nested:
        known |= {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [dict(known)]}}
    return KVTransferConfig(**known)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvq.integration.plan import connectors

    monkeypatch.setattr(connectors, "can_copy", lambda platform: True)


def test_it_can_be_named_next_to_the_flag(configured: Bare, copying: None) -> None:
    """As docs/serving.md has it."""
    from vllm.config import KVTransferConfig

    def named(fingerprint: str) -> Any:
        extra = {"kvq_fingerprint": fingerprint}
        return {"kv_offloading_size": 0.25, "kv_transfer_config": KVTransferConfig(kv_connector_extra_config=extra)}

    mine = plan(configured(**SQUAT)).fingerprint
    how = configured(**SQUAT, **named(mine)).kv_transfer_config
    assert how.kv_connector == "SimpleCPUOffloadConnector"
    assert how.kv_connector_extra_config["kvq_fingerprint"] == mine
    with pytest.raises(Refused, match="of fingerprint 0000"):
        configured(**SQUAT, **named("0" * 12))


@pytest.mark.parametrize("nested", [False, True])
def test_a_store_of_others_is_refused(nested: bool, configured: Bare, copying: None) -> None:
    """Before weights load: the sentence has both fingerprints and the way out."""
    ours = configured(**SQUAT, kv_transfer_config=transfer(nested=nested))
    mine = ours.kv_transfer_config.kv_connector_extra_config["kvq_fingerprint"]
    other = configured(**SQUAT, **kvq(W=64), kv_transfer_config=transfer(nested=nested))
    theirs = other.kv_transfer_config.kv_connector_extra_config["kvq_fingerprint"]
    assert mine == plan(ours).fingerprint != theirs
    with pytest.raises(Refused) as caught:
        configured(**SQUAT, kv_transfer_config=transfer(theirs, nested=nested))
    assert str(caught.value) == (
        f"the store holds pages of fingerprint {theirs} (kvq_fingerprint in kv_connector_extra_config), and this "
        f"server writes pages of {mine}: it would read none of those; serve with the format, options, model and "
        "revision of the servers that wrote them, or drop kvq_fingerprint"
    )
    # its own passes, also in the copies that vLLM makes
    again = configured(**SQUAT, kv_transfer_config=transfer(mine, nested=nested))
    for copied in (again, pickle.loads(pickle.dumps(again)), replace(again)):
        platform.configure(copied)
        assert copied.kv_transfer_config.kv_connector_extra_config["kvq_fingerprint"] == mine
    # without a format of ours nothing is compared
    configured(kv_transfer_config=transfer(theirs, nested=nested))


def test_what_a_server_has_marked_itself_is_not_compared(configured: Bare, copying: None) -> None:
    """A copy that is made late may have another block size, vLLM's, and so another fingerprint; the user named none."""
    vllm_config = configured(**SQUAT, kv_transfer_config=transfer())
    assert store_problem(vllm_config, "0" * 12) is None


def test_the_log_says_whose_pages_are_found(configured: Bare, copying: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvq.integration.plan import connectors

    said: list[str] = []
    monkeypatch.setattr(connectors.logger, "info_once", lambda text, *values: said.append(text % values))
    fingerprint = plan(configured(**SQUAT, kv_transfer_config=transfer())).fingerprint
    assert {*said} == {
        f"kvq: SimpleCPUOffloadConnector keeps pages under the fingerprint {fingerprint}; "
        "pages with other fingerprints are not found"
    }
    said.clear()
    configured(**SQUAT)
    assert said == []


def test_it_covers_constants(bare: Bare) -> None:
    """Also those that are to be fitted: to another model, or to other layers; the number of bits is an option."""
    config = bare(kv_cache_dtype="klt3")
    served = plan(config)
    found = [with_calibration(config, served, digest).fingerprint for digest in ("1" * 12, "2" * 12)]
    others = [plan(bare(kv_cache_dtype="klt3", **more)).fingerprint for more in (kvq(skip_layers=[1]), kvq(S=0))]
    assert len({served.fingerprint, *found, *others}) == 5
