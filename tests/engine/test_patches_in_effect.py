"""Every patch is installed once, takes effect, and stays in effect below what others wrap around it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import traces
from patches_here import WRAPS, everything, named

from proof.oracle.engines.forked import EngineProcess
from vllm_kvq.integration import plugin
from vllm_kvq.integration.patches import once
from vllm_kvq.integration.patches.patch import Moment, Patch
from vllm_kvq.integration.patches.registered import variables
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.kernels.variables import VARIABLES

pytestmark = pytest.mark.engine


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own functions, until the test is over."""
    for patch in WRAPS:
        for name in patch.replaces:
            module = importlib.import_module(name.partition(":")[0])
            owner, attribute = once._place(name, module)
            _, kind = once._function(owner, attribute)
            monkeypatch.setattr(owner, attribute, kind(once.own(name)) if kind else once.own(name))


def install(patch: Patch) -> None:
    assert patch.install is not None
    patch.install(plugin.hooks() if patch.moment is Moment.REGISTERED else everything())


def held(patch: Patch) -> list[Any]:
    places = (once._place(name, sys.modules[name.partition(":")[0]]) for name in patch.replaces)
    return [inspect.getattr_static(*place) for place in places]


@pytest.mark.parametrize("patch", WRAPS, ids=named)
def test_installed_twice_it_wraps_once(patch: Patch, pristine: None) -> None:
    own = [once.own(name) for name in patch.replaces]
    assert not patch.in_effect()
    install(patch)
    first = held(patch)
    assert patch.in_effect()
    install(patch)
    assert [a is b for a, b in zip(held(patch), first, strict=True)] == [True] * len(first)
    assert [a is b for a, b in zip(map(once.own, patch.replaces), own, strict=True)] == [True] * len(own)
    assert not any(hasattr(function, once.MARK) for function in own)


@pytest.mark.parametrize("patch", WRAPS, ids=named)
def test_somebody_elses_wrapper_around_ours_stays(patch: Patch, pristine: None) -> None:
    """Our patch is in effect below it, and is not installed again around it."""
    own = [once.own(name) for name in patch.replaces]
    install(patch)
    for name in patch.replaces:
        owner, attribute = once._place(name, sys.modules[name.partition(":")[0]])
        ours, kind = once._function(owner, attribute)

        @functools.wraps(ours)
        def theirs(*args: Any, ours: Any = ours, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        setattr(owner, attribute, kind(theirs) if kind else theirs)
    before = held(patch)
    install(patch)
    assert [a is b for a, b in zip(held(patch), before, strict=True)] == [True] * len(before)
    assert [a is b for a, b in zip(map(once.own, patch.replaces), own, strict=True)] == [True] * len(own)
    assert patch.in_effect()


@pytest.mark.parametrize("patch", [p for p in WRAPS if p.moment is Moment.REGISTERED], ids=named)
def test_a_patch_that_something_undoes_is_noticed(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    assert patch.in_effect()
    for name in patch.replaces:
        with monkeypatch.context() as undone:
            owner, attribute = once._place(name, sys.modules[name.partition(":")[0]])
            _, kind = once._function(owner, attribute)
            undone.setattr(owner, attribute, kind(once.own(name)) if kind else once.own(name))
            assert not patch.in_effect()
    assert patch.in_effect()


def test_our_variables_are_known_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --fail-on-environ-validation vLLM refuses VLLM_* variables that it does not know; otherwise it warns. Those
    that are not set stay out of the key of its compile cache."""
    from vllm import envs
    from vllm.platforms import current_platform

    monkeypatch.setattr(envs, "environment_variables", {**envs.environment_variables})
    known = {*envs.environment_variables} - {*VARIABLES}
    for name in VARIABLES:
        envs.environment_variables.pop(name, None)
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("VLLM_") and name not in known]:
        monkeypatch.delenv(name)
    patch = variables.VARIABLES_KNOWN
    assert patch.install is not None
    monkeypatch.setenv("VLLM_KVQ_CACHE", "somewhere")
    assert not patch.in_effect()
    with pytest.raises(ValueError, match="VLLM_KVQ_CACHE"):
        current_platform.validate_environ(True)
    patch.install(SimpleNamespace())
    assert patch.in_effect()
    current_platform.validate_environ(True)
    assert {*envs.environment_variables} - known == {"VLLM_KVQ_CACHE"}
    assert envs.environment_variables["VLLM_KVQ_CACHE"]() == "somewhere"


def not_in_effect(engine: Any) -> list[str]:
    """The patches that an engine needs and its process lacks."""
    vllm_config = engine.engine.vllm_config
    wanted = [patch for patch in PATCHES if patch.install is not None and patch.wanted(vllm_config)]
    assert {patch.moment for patch in wanted} == {Moment.REGISTERED, Moment.CONFIGURED, Moment.LOADED, Moment.BUILT}
    return [patch.what for patch in wanted if not patch.in_effect()]


def test_all_are_in_effect_in_an_engine(model: Path) -> None:
    engine = {"kv_cache_dtype": "squat2", "block_size": 32, "max_model_len": 256, "max_num_seqs": 4}
    with EngineProcess(str(model), engine, {}) as process:
        assert process.call(not_in_effect) == []
        assert process.run(traces.few(32)[0]).outputs


# -- consequences -----------------------------------------------------------------------------------------------------
def test_nobody_changes_the_default_block_size(model: Path) -> None:
    """vLLM 0.33 would ask the backend after the model is loaded, when the formats are already bound."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    config = EngineArgs(
        model=str(model), kv_cache_dtype="squat2", max_model_len=256, kv_cache_memory_bytes=1 << 30
    ).create_engine_config()
    assert config.cache_config.block_size == 128
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == 128
