"""The name of a budget: the most precise format within it that a server can have, found and reported at start-up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engine_arguments import kvq
from models_on_disk import SMALL, Written

from proof.models import named
from proof.models.checkpoints import write_model
from proof.oracle.engines import forked
from vllm_kvq.formats import FORMATS
from vllm_kvq.formats.budgets import BUDGETS, Budget
from vllm_kvq.integration.advice import losses
from vllm_kvq.integration.plan.budgets import Chosen, choose
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.kernels.cpu import slow as slow_on_cpu
from vllm_kvq.kernels.cpu import step as cpu
from vllm_kvq.kernels.gpu import slow as slow_on_gpu
from vllm_kvq.problem import Refused

LIMITS = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}


def chosen(model: Path, budget: str, **arguments: Any) -> tuple[Chosen, Any]:
    """What a server chooses, and chooses again when asked with the finished configuration."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(model), kv_cache_dtype=budget, **LIMITS, **arguments).create_engine_config()
    found = choose(config, BUDGETS[budget])
    assert config.cache_config.cache_dtype == found.format
    return found, config


# -- what is declared -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=list(BUDGETS))
def test_its_formats_are_within_it(budget: Budget) -> None:
    for name in budget.formats:
        assert FORMATS[name].public
        assert FORMATS[name].bits_per_element(128, 128) <= budget.most
        assert FORMATS[name].keys.hurt_by_biases is None


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=list(BUDGETS))
def test_its_first_format_is_the_most_precise(budget: Budget) -> None:
    """On the real models that were measured with both, on average."""
    best, *others = budget.formats
    for other in others:
        both = [m.kl for m in losses.measured() if best in m.kl and other in m.kl]
        assert len(both) >= 3
        assert sum(math.log(kl[best] / kl[other]) for kl in both) < 0


def test_a_budget_is_not_nothing() -> None:
    for wrong in (("", 3, ("kivi2",)), ("kvq3", 0, ("kivi2",)), ("kvq3", 16, ("kivi2",)), ("kvq3", 3, ())):
        with pytest.raises(ValueError, match="needs a name, a number of bits below 16 and a format"):
            Budget(*wrong)


def test_only_a_server_knows_what_it_means() -> None:
    assert "kvq3" not in FORMATS
    with pytest.raises(KeyError, match="'kvq3' is a budget, which means klt3 or kitty2, depending on model and server"):
        FORMATS["kvq3"]


# -- what a server takes ----------------------------------------------------------------------------------------------
@pytest.mark.engine
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=list(BUDGETS))
def test_the_first_one(model: Path, budget: Budget) -> None:
    found, config = chosen(model, budget.name, **kvq(W=64, skip_layers=[0]))
    assert found == Chosen(budget.name, budget.formats[0], {})
    assert str(found) == f"{budget.name} is {budget.formats[0]} here"
    served = plan(config)
    assert (served.format.name, served.format.W, list(served.layers.skipped)) == (budget.formats[0], 64, [0])


@pytest.mark.engine
def test_the_next_one_where_the_first_is_refused(model: Path) -> None:
    found, _ = chosen(model, "kvq3", data_parallel_size=2)
    assert found.format == "kitty2"
    assert str(found).startswith(
        "kvq3 is kitty2 here (not klt3: constants are fitted only by a server without data parallelism; start the model"
    )


@pytest.mark.engine
def test_the_next_one_where_the_first_has_no_fast_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    assert chosen(model, "kvq4")[0] == Chosen("kvq4", "klt4", {})
    monkeypatch.setattr(slow_on_gpu, "slow", lambda fmt: "slow here" if fmt.calibrated else None)
    assert chosen(model, "kvq4")[0] == Chosen("kvq4", "polar4", {"klt4": "slow here"})


@pytest.mark.engine
def test_the_next_one_where_the_first_has_no_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda fmt: "no kernels here" if fmt.calibrated else None)
    monkeypatch.setattr(slow_on_cpu, "slow", lambda fmt: None)
    assert chosen(model, "kvq4")[0] == Chosen("kvq4", "polar4", {"klt4": "no kernels here"})


@pytest.mark.engine
def test_the_first_one_where_nothing_is_fast(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    assert chosen(model, "kvq3")[0] == Chosen("kvq3", "klt3", {})
    found, _ = chosen(model, "kvq3", data_parallel_size=2)
    assert (found.format, [*found.passed_over]) == ("kitty2", ["klt3"])
    assert "not klt3: constants are fitted only by" in str(found)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("budget", "arguments", "sentence"),
    [
        ("kvq3", kvq(boost="half"), "kvq option 'boost' belongs to a format, and kvq3 may be klt3 or kitty2; name the"),
        ("kvq3", kvq(calibration="/nowhere"), "there is no calibration /nowhere; leave the option 'calibration' out"),
        ("kvq2", {"data_parallel_size": 2}, "--kv-cache-dtype kvq2 (klt2): constants are fitted only by a server"),
        (
            "kvq4",
            {"kv_sharing_fast_prefill": True},
            "--kv-cache-dtype kvq4 (kitty2) does not support --kv-sharing-fast",
        ),
        ("kvq3", kvq(W=33), "option 'W' is 33; it takes a whole number from 0 to 4096, a multiple of 32"),
    ],
)
def test_refusals(model: Path, budget: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as caught:
        chosen(model, budget, **arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.engine
def test_a_hybrid_has_another_format(tmp_path: Path) -> None:
    write_model(named("Qwen3-Next"), tmp_path)
    assert chosen(tmp_path, "kvq3")[0].format == "kitty2"
    with pytest.raises(Refused, match="use --kv-cache-dtype kitty2"):
        chosen(tmp_path, "kvq2")


@pytest.mark.engine
def test_an_engine_is_that_of_the_format(written: Written, tmp_path: Path) -> None:
    """In processes of their own: the same tokens, from the constants that the first of them has left."""
    model = written(**SMALL)
    by_budget, by_name = (forked.call(answered, str(model), str(tmp_path), name) for name in ("kvq3", "klt3"))
    assert by_budget == by_name
    assert len(list((tmp_path / "vllm_kvq" / "calibration").iterdir())) == 1


def answered(model: str, cache: str, name: str) -> Any:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    import traces

    from proof.oracle.engines.engine import TracedEngine

    return TracedEngine(model, kv_cache_dtype=name, **LIMITS).run(traces.all_traces(32)[0]).outputs
