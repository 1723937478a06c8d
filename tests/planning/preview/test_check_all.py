"""`vllm-kvq check MODEL`: every format's gain and loss, those that can't be served with their sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvq import cli
from vllm_kvq.cli.check import every
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import FORMATS, suite
from vllm_kvq.integration.advice import losses, speeds
from vllm_kvq.integration.plan.memory import GIB, Machine, _problem
from vllm_kvq.integration.preview import description
from vllm_kvq.kernels.cpu.library import ISAS, isa

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def survey(model: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status = cli.main(["check", str(model), "--max-model-len", "1024", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)["formats"]


def test_each_format_is_what_check_says_of_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = survey(model, capsys)
    names = [one["format"] for one in found]
    assert status == 0
    recommended = BUDGETS[RECOMMENDED].formats[0]
    assert names[0] == recommended
    assert tuple(names[: len(suite("usual"))]) == suite("usual")
    assert sorted(names) == sorted(suite("public"))
    one = next(one for one in found if one["format"] == "polar4")
    arguments = ["check", str(model), "--max-model-len", "1024", "--kv-cache-dtype", "polar4", "--json"]
    assert cli.main(arguments) == 0
    assert {k: v for k, v in one.items() if k not in ("loss", "speed")} == json.loads(capsys.readouterr().out)
    assert one["loss"]["kl"] == losses.like(64, False).kl["polar4"]


def test_what_is_refused_has_its_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = survey(model, capsys, "--additional-config", '{"kvq": {"r": 8}}')
    served = {one["format"] for one in found if one["starts"]}
    assert status == 0
    assert served == {name for name in suite("public") if FORMATS[name].keys.name == "squat"}
    assert all("'r'" in one["sentence"] for one in found if not one["starts"])


def test_the_recommended_format_comes_first_where_it_is_another(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of those that take an option of kitty's, not what the budget means without that option."""
    status, found = survey(model, capsys, "--additional-config", '{"kvq": {"boost": "half"}}')
    recommended = next(name for name in BUDGETS[RECOMMENDED].formats if FORMATS[name].keys.name == "kitty")
    assert status == 0
    assert recommended != BUDGETS[RECOMMENDED].formats[0]
    assert found[0]["format"] == recommended


def test_budgets_are_what_a_server_chooses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--data-parallel-size", "2"]):
        arguments = ["check", str(model), "--max-model-len", "1024", "--kv-cache-memory-bytes", "512M", *more, "--json"]
        cli.main(arguments)
        found = json.loads(capsys.readouterr().out)["budgets"]
        for budget in BUDGETS:
            cli.main([*arguments, "--kv-cache-dtype", budget])
            assert json.loads(capsys.readouterr().out).get("format") == found.get(budget)


def test_the_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(model), "--max-model-len", "1024"]) == 0
    said = capsys.readouterr().out
    first = suite("usual")[0]
    line = next(line for line in said.splitlines() if line.startswith(first))
    assert line.split()[1] == f"{FORMATS[first].bits_per_element(64, 128):.2f}" == "3.19"
    assert "\nbudgets      kvq4 is klt4, kvq3 is klt3, kvq2 is klt2\n" in said
    assert f"switch on    vllm serve {model} --max-model-len 1024 --kv-cache-dtype {RECOMMENDED}\n" in said
    assert f"details      vllm-kvq check {model} --max-model-len 1024 --kv-cache-dtype {RECOMMENDED}\n" in said
    assert line.split()[5] == known_speed(first)
    assert "KL: nats per token, on SmolLM2-135M at 1,024 tokens (head size 64, no large key biases); fp8 has" in said
    table = said[said.index("\nformat ") : said.index("\nbits: ")]
    assert max(map(len, table.splitlines())) <= 80


def test_no_format_is_offered_where_none_holds_more(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(model), "--max-model-len", "64"]) == 0
    said = capsys.readouterr().out
    last = "no format helps: bf16 holds more requests of 64 tokens; leave --kv-cache-dtype out"
    assert said.splitlines()[-1] == last
    assert "switch on" not in said
    assert "so short" not in said


def test_memory_that_is_not_free(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's default takes nearly all of it: what is counted instead is named, and what serving needs."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(Machine, "here", lambda: Machine(100 * GIB, 8 * GIB))
    _problem.cache_clear()
    assert cli.main(["check", str(model), "--max-model-len", "1024"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("vLLM would take 92% of this machine's memory (92.0 GiB), but 8.0 GiB of 100.0 GiB are free")
    flags = "--max-model-len 1024 --kv-cache-memory-bytes 4G --kv-cache-dtype"
    assert f"vllm serve {model} {flags} {RECOMMENDED}\n" in said
    assert f"vllm-kvq check {model} {flags} {RECOMMENDED}\n" in said
    assert "\nkitty2 " in said
    assert every.memory_wanted(["M"]) is not None
    assert every.memory_wanted(["M", "--gpu_memory_utilization=0.05"]) is None
    assert every.memory_wanted(["M", "--kv-cache-memory-bytes", "1G"]) is None
    monkeypatch.setattr(Machine, "here", lambda: Machine(100 * GIB, 95 * GIB))
    assert every.memory_wanted(["M"]) is None
    _problem.cache_clear()


def known_speed(name: str) -> str:
    """As the table has it; this processor, or this format on it, may never have been measured."""
    fast = speeds.nearest(ISAS[isa()], 1024)
    return "-" if fast is None or name not in fast.times_bf16 else f"{fast.times_bf16[name]:.1f}"


@pytest.mark.parametrize(
    ("kind", "said", "measured"),
    [("avx2", "1.9", "AMD EPYC (Zen 3)"), ("avx512", "2.6", "AMD EPYC (Zen 4)"), ("portable", "-", "")],
)
def test_the_expected_speed_is_that_of_this_kind_of_processor(
    kind: str,
    said: str,
    measured: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(description, "isa", lambda: ISAS.index(kind))
    assert cli.main(["check", str(model), "--max-model-len", "1024"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.startswith(suite("public"))}
    assert rows["kitty2"][5] == said
    assert rows["polar3"][5] == "-"  # in no row of that processor
    where = f"on {measured} at 1,024 tokens (head size 128)" if measured else "not measured on this kind"
    assert where in printed


@pytest.mark.parametrize(("minor", "said"), [(0, "1.3"), (6, "-")])
def test_on_a_gpu_it_is_that_of_its_architecture(
    minor: int, said: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVQ_GPU_PATH", "1")
    found = SimpleNamespace(to_int=lambda: 90 + minor)
    monkeypatch.setattr(
        description, "current_platform", SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: found)
    )
    assert cli.main(["check", str(model), "--max-model-len", "4096"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.startswith(suite("public"))}
    assert rows["kitty2"][5] == said
    assert ("NVIDIA H200, 8 requests at 4,096 tokens (head size 128)" in printed) == (not minor)


def test_what_is_slow_has_no_expected_speed(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNELS", "torch")
    _, found = survey(model, capsys)
    assert [one["format"] for one in found if one["speed"]] == []


def test_the_speeds_are_those_of_the_recorded_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import speeds as script

    assert script.WRITTEN.read_text(encoding="utf-8") == script.speeds(), "python scripts/speeds.py"
    sys.modules.pop("speeds")
    assert {path.name for path in script.RESULTS.glob("cpu-attention*.csv")} == set(script.PROCESSORS)
    assert {path.name for path in script.RESULTS.glob("gpu-nvidia-*.csv")} == set(script.GPUS)
    names = {*script.PROCESSORS.values(), *(name for name, _ in script.GPUS.values())}
    assert {s.processor for s in speeds.measured()} <= names


def test_a_reason_that_all_share_is_said_once(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["check", str(model), "--max-model-len", "100000"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert said.startswith("no: ")
    assert said.count("derived max_model_len") == 1


def test_the_losses_are_those_of_the_recorded_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import losses as script

    assert script.WRITTEN.read_text(encoding="utf-8") == script.losses(), "python scripts/losses.py"
    sys.modules.pop("losses")
    assert {m.model for m in losses.measured()} == {title for title, _, _ in script.MODELS.values()}
    assert all("fp8" in m.kl for m in losses.measured())


@pytest.mark.parametrize(
    ("head_size", "biases", "model"),
    [
        (64, False, "SmolLM2-135M"),
        (256, False, "Gemma-3-270M"),
        (512, False, "Gemma-3-270M"),
        (64, True, "Qwen2.5-Coder-0.5B"),
        (128, True, "Qwen2.5-Coder-1.5B"),
        (512, True, "Qwen2.5-Coder-1.5B"),  # biases decide more than the head size
    ],
)
def test_the_nearest_measured_model(head_size: int, biases: bool, model: str) -> None:
    assert losses.like(head_size, biases).model == model
