"""Bad input: one sentence on standard error that names it and the way out, and exit code 2 before anything loads."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from vllm_kvq import cli, roundtrip
from vllm_kvq.cli.check.words import words_problem
from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.plan.model import weights
from vllm_kvq.integration.preview import hub
from vllm_kvq.integration.worker.report import Capacity, capacity_warning
from vllm_kvq.kernels.variables import VARIABLES, variables_problem

ROOT = Path(__file__).parents[2]
BAD = [
    ("check M --config nope.yaml", "--config: there is no file nope.yaml"),
    ("check M --config empty.yaml", "empty.yaml has no options; it takes lines such as kv-cache-dtype: kitty2"),
    ("check M --config broken.yaml", "broken.yaml is not YAML"),
    ("check M --config good.yaml --config=good.yaml", "--config is given more than once"),
    ("check M --kv-cache-dtype squat3", "there is no format 'squat3'; did you mean squat4?"),
    ("check M --kv-cache-dtype zzz", "there is no format 'zzz'; the formats are kvq4, kvq3, kvq2, squat2"),
    ('check M --additional-config {"kvq":{"W":64,"W":32}}', "--additional-config gives 'W' twice"),
    ("check M --additional-config {bad", "--additional-config is not JSON"),
    ("check M --additional-config [1]", "it takes an object"),
    ("check M --kv-cache-memory-bytes=", "--kv-cache-memory-bytes is empty"),
    ("check /nonexistent", "there is no folder /nonexistent"),
    ("check --model ./nothing", "there is no folder ./nothing"),
    ("check file.gguf", "file.gguf is a file; name the folder"),
    ("calibrate demo --bits 0", "0 is not between 0 and 16 bits"),
    ("calibrate demo --bits -1", "-1 is not between 0 and 16 bits"),
    ("calibrate demo --bits nan", "nan is not between 0 and 16 bits"),
    ("eval demo --tokens 0", "0 is below 1"),
    ("eval demo --out file.gguf", "argument --out: file.gguf is a file; name a folder"),
    ("bench attention --context 999999999999", "999999999999 tokens take"),
    ("bench attention --query-heads 0", "argument --query-heads: 0 is below 1"),
    ("bench attention --threads 9999", "argument --threads: 9999 is more than the "),
    ("bench prefill --threads 9999", "argument --threads: 9999 is more than the "),
    ("bench prefill --context 999999999999", "999999999999 tokens take"),
    ("bench slow --context 999999999999", "999999999999 tokens take"),
    ("bench decode demo --context 99999", "demo has 4096 positions, and requests take 100127; lower --context"),
    ("bench serve demo --context 512,99999", "demo has 4096 positions, and requests take "),
    ("bench gpu --seconds -1", "--seconds -1 is below 0"),
    ("check M --config", "--config names no file"),
    ("eval heads demo --context 66", "--context 66: squat2 packs nothing of so short a text"),
    ("calibrate demo --context 66 --formats innerq2", "innerq2 packs nothing of so short a text"),
    ("eval humaneval M --limit 165", "--limit 165 is more than the 164 problems"),
    ("eval answers demo --tokens 0", "argument --tokens: 0 is below 1"),
    ("bench decode demo --tokens 0", "argument --tokens: 0 is below 1"),
    ("eval demo --fromats squat2", "unknown argument --fromats; did you mean --formats?"),
    ("bench attention --out file.gguf", "argument --out: file.gguf is a file; name a folder"),
    ("bench gpu --dry-run --context 64 --batch 2", "own; leave out --context, --batch"),
    ("bench gpu --dry-run --compile", "--dry-run launches shapes of its own; leave out --compile"),
    ("bench gpu --compile --batch 1,8,64", "--compile launches shapes of its own; leave out --batch"),
    ("bench decode /nope", "there is no folder '/nope'; demo is the repository's model"),
    ("bench decode file.gguf", "file.gguf is a file; name the folder that holds the checkpoint's config.json"),
    ("bench decode .", "the folder '.' has no config.json, so it holds no checkpoint"),
    ("bench serve --out file.gguf", "argument --out: file.gguf is a file; name a folder"),
    ("formats --options --head-size 64", "leave out --head-size"),
    ("formats --options --head-size 7", "no format has heads of 7 channels; there are 64"),
]


@pytest.mark.parametrize(("command", "sentence"), BAD, ids=[command for command, _ in BAD])
def test_one_sentence(
    command: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"empty.yaml": "", "broken.yaml": "a: [1", "good.yaml": "seed: 1", "file.gguf": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        cli.main(command.split())
    said = capsys.readouterr()
    assert exited.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert sentence in line


def test_the_memory_that_the_environment_names() -> None:
    assert words_problem(["M"], {"VLLM_CPU_KVCACHE_SPACE": "2GB"}) == (
        "VLLM_CPU_KVCACHE_SPACE is '2GB'; it takes whole GiB, as in VLLM_CPU_KVCACHE_SPACE=4"
    )
    for fine in ("4", ""):
        assert words_problem(["M"], {"VLLM_CPU_KVCACHE_SPACE": fine}) is None


def test_good_words_have_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = (
        "Qwen/Qwen3-0.6B --kv-cache-dtype kitty2",
        "--kv-cache-dtype fp8 --model .",
        'M --additional-config {"kvq":{"W":64},"other":{"W":1}} --kv-cache-memory-bytes 4G',
    )
    for words in good:
        assert words_problem(words.split(), {}) is None


def test_a_variable_that_nothing_reads() -> None:
    assert variables_problem({"VLLM_KVQ_KERNEL": "torch", "PATH": ""}) == (
        "the environment has VLLM_KVQ_KERNEL, which nothing reads; did you mean VLLM_KVQ_KERNELS?"
    )
    assert variables_problem(dict.fromkeys(VARIABLES, "1")) is None


def test_commands_warn_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNEL", "torch")
    assert cli.main(["formats"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-kvq: warning: the environment has VLLM_KVQ_KERNEL, which nothing reads; did you mean")


@pytest.mark.parametrize("name", [" ".join(command.words) for command in cli.COMMANDS])
def test_a_parser_loads_no_vllm(name: str) -> None:
    """So that wrong usage is said soon."""
    command = next(c for c in cli.COMMANDS if " ".join(c.words) == name)
    code = f"import sys, importlib; importlib.import_module({command.module!r}).parser(); print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_every_variable_is_known() -> None:
    """Those that sources read, and no other."""
    files = [*(ROOT / "vllm_kvq").glob("**/*.py"), *(ROOT / "csrc").glob("**/*.*"), *(ROOT / "proof").glob("**/*.py")]
    own = ROOT / "vllm_kvq" / "kernels" / "variables.py"
    text = "".join(path.read_text(encoding="utf-8") for path in files if path != own)
    assert {*re.findall(r"VLLM_KVQ_[A-Z_]*[A-Z]", text)} == {*VARIABLES}


def test_a_head_size_that_one_format_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats", "--head-size", "512", "--block-size", "64"]) == 0
    said = capsys.readouterr().out
    qjl, _ = (line for line in said.splitlines() if line.startswith("qjl3 "))
    assert qjl.split()[-1] == "-"
    assert "\nqjl3: QJL names outlier channels by bytes" in said
    assert cli.main(["formats", "--head-size", "512", "--json"]) == 0


def test_requests_that_are_shorter_than_their_sidecar() -> None:
    (said,) = capacity_warning(Capacity(273907, 524275, 0.5, 4), 64)
    assert said.startswith("requests of 64 tokens are so short that fewer of them fit than with bf16")
    assert capacity_warning(Capacity(480000, 524275, 0.92, 4), 64) == []


KEY = torch.randn(64, 2, 64)
HEADS_FIRST = torch.randn(2, 320, 64)
ROUNDTRIPS = {
    "a list": ([[[1.0]]], KEY, None, "key is a list; it takes a torch.Tensor"),
    "an array": (KEY.numpy(), KEY, None, "key is a ndarray; it takes a torch.Tensor"),
    "whole numbers": (KEY, KEY.long(), None, "value is of torch.int64; it takes floating point numbers"),
    "truth values": (KEY.bool(), KEY, None, "key is of torch.bool"),
    "complex numbers": (KEY, KEY.to(torch.complex64), None, "value is of torch.complex64"),
    "no heads": (KEY[:, :0], KEY[:, :0], None, r"must both be \(tokens, heads, head_size\)"),
    "another order": (KEY, KEY.transpose(0, 1), None, r"must both be \(tokens, heads, head_size\)"),
    "another head size": (KEY, KEY, torch.randn(64, 4, 128), "with the keys' head_size 64"),
    "no query": (KEY, KEY, None, "^squat2 is fitted to a prompt's queries; give them as `query`, "),
    "heads before tokens": (HEADS_FIRST, HEADS_FIRST, None, r"would have 320 heads; .* x.transpose\(0, 1\) makes"),
    "heads that do not share": (KEY, KEY, torch.randn(64, 3, 64), "a multiple of their 2 heads"),
}


@pytest.mark.parametrize("case", ROUNDTRIPS)
def test_what_roundtrip_does_not_take(case: str) -> None:
    key, value, query, sentence = ROUNDTRIPS[case]
    with pytest.raises((TypeError, ValueError), match=sentence):
        roundtrip("squat2", key, value, query)  # type: ignore[arg-type]


def test_an_unknown_format() -> None:
    with pytest.raises(KeyError, match="did you mean 'squat4'"):
        FORMATS["squat3"]
    assert "squat3" not in FORMATS


@pytest.mark.parametrize(("key", "near"), [("kqv", True), ("kv", True), ("KVQ", True), ("other", False)])
def test_a_name_like_kvq_is_not_ignored(key: str, near: bool) -> None:
    from vllm_kvq.integration.plan.options import unread_options

    config = SimpleNamespace(additional_config={key: {"W": 64}}, cache_config=SimpleNamespace(cache_dtype="kitty2"))
    found = unread_options(config)  # type: ignore[arg-type]
    assert (found is not None) == near


# -- the model hub ----------------------------------------------------------------------------------------------------
@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "weights_folder", lambda name, revision: tmp_path if name == str(tmp_path) else None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub.hub_problem.cache_clear()
    yield
    hub.hub_problem.cache_clear()


@pytest.mark.usefixtures("no_cache")
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once, and for a second; where one listens, vLLM looks the name up."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert hub.hub_problem("smollm2") == (
            f"there is no folder smollm2, and no such model in the hub's cache, and {constants.ENDPOINT} can't be "
            "reached; name a folder, or another hub with HF_ENDPOINT"
        )
        listening.listen()
        assert hub.hub_problem("smollm3") is None
        monkeypatch.setattr(hub, "SECONDS", 0.2)
        for mute in ("http://192.0.2.1", "http://name.invalid"):  # addresses and names that nobody has
            hub.hub_problem.cache_clear()
            monkeypatch.setattr(constants, "ENDPOINT", mute)
            assert f"{mute} can't be reached" in (hub.hub_problem("smollm2") or "")


@pytest.mark.usefixtures("no_cache")
def test_a_hub_that_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(socket, "create_connection", asked)
    for fine in (str(tmp_path), "s3://bucket/model", "a/model:Q4_K_M", "a/model/model-Q4_K_M.gguf"):
        assert hub.hub_problem(fine) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "; name a folder, or unset HF_HUB_OFFLINE" in (hub.hub_problem("smollm2") or "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert hub.hub_problem("smollm4") is None
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setattr(weights, "weights_folder", lambda name, revision: tmp_path)
    assert hub.hub_problem("smollm5") is None
