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
from vllm_kvq.cli.arguments import folder
from vllm_kvq.cli.check import one as check
from vllm_kvq.cli.check.words import wrong_words
from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.plan.model import weights
from vllm_kvq.integration.preview import hub
from vllm_kvq.integration.worker.report import Capacity, capacity_warning
from vllm_kvq.kernels.variables import VARIABLES, variables_problem
from vllm_kvq.meant import SURE, meant

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
    ("check nope.gguf", "there is no file nope.gguf; name a checkpoint's folder, or a file on the hub"),
    ("check --model=", "the model's name is empty; name a checkpoint's folder"),
    ("check empty", "the folder empty has no config.json, so it holds no checkpoint; name a"),
    ("plan empty", "the folder empty has no config.json, so it holds no checkpoint; name a"),
    ("check a/b/c", "there is no folder a/b/c, and no model on the hub can have that name"),
    ("check smollm2", "there is no folder smollm2, and no such model in the hub's cache; name a folder"),
    ("check owner/smollm2/x.gguf", "there is no folder owner/smollm2/x.gguf, and no such model in the hub's cache"),
    ("check --kv-cache-dtype kitty2", "name a model: a checkpoint folder, or a name on the model hub"),
    ('check M --additional-config {"kvq":{"w":64}}', "unknown kvq option 'w'; did you mean 'W'?"),
    ('check M --kv-cache-dtype kitty2 --additional-config {"kvq":{"W":33}}', "option 'W' is 33; it takes a whole"),
    ('check M --kv-cache-dtype kitty2 --additional-config {"kvq":{"r":8}}', "option 'r' is not read by kitty2"),
    ('check M --additional-config {"kvq":{"r":99}}', "option 'r' is 99; it takes a whole number from 1 to 64"),
    ('check M --additional-config {"kvq":{"m":{"0":512}}}', "option 'm' is given by layer without \"*\""),
    ('check M --additional-config {"kvq":3}', "additional config 'kvq' is 3; it must be an object of options"),
    ("check M --config options.yaml", "in options.yaml, unknown kvq option 'w'; did you mean 'W'?"),
    ("check M --config kqv.yaml", "in kqv.yaml, additional config 'kqv' is not read; did you mean 'kvq'?"),
    (
        "check M --config dtype.yaml",
        "in dtype.yaml, --kv-cache-dtype: there is no format 'kity2'; did you mean kitty2?",
    ),
    ("check M --config twins.yaml", "twins.yaml has additional-config on lines 1 and 5, of which only the last"),
    ("check M --config twin.yaml", "twin.yaml has W on lines 3 and 4, of which only the last would be read"),
    ("check M --max-model-len 0", "--max-model-len is 0; it takes the tokens of the longest request"),
    ("check M --max_model_len ten", "--max-model-len is ten; it takes the tokens of the longest request"),
    ("check M --block-size 48", "--block-size is 48; it takes the tokens of a page, 32 to 1024, multiple of 32"),
    ("check M --block-size 0", "--block-size is 0; it takes the tokens of a page"),
    ("check M --kv-cache-dtype", "--kv-cache-dtype has no value; write it as in --kv-cache-dtype kvq3"),
    ("check M --kv-cache-dtype --seed 1", "--kv-cache-dtype has no value; write it as in"),
    ("check M --config valueless.yaml", "in valueless.yaml, --kv-cache-dtype has no value"),
    ("eval /nope", "there is no folder /nope; name a checkpoint's folder"),
    ("eval empty", "the folder empty has no config.json"),
    ("calibrate /nope", "there is no folder /nope; name a checkpoint's folder"),
    ("eval heads file.gguf", "file.gguf is a file; name the folder"),
    ("eval answers /nope", "there is no folder /nope; name a checkpoint's folder"),
    ("eval humaneval /nope", "there is no folder /nope; name a checkpoint's folder"),
    ("eval show nope.json", "there is no file nope.json; name a results.json of"),
    ("eval show empty", "empty is a folder; name a results.json of"),
    ("bench plot nope.csv", "there is no file nope.csv; name a CSV"),
    ("eval demo --out /proc/nope", "argument --out: /proc/nope can't be written (No such file or directory); name"),
    ("eval demo --context 64,2048 --formats kitty2", "--context 64: kitty2 packs nothing of so short a text"),
    ("eval demo --folder results", "unknown argument --folder; it is --out here"),
    ("bench decode --model demo", "unknown argument --model; MODEL is given without a flag"),
    ("formats --shape 3", "unknown argument --shape; see vllm-kvq formats --help"),
    ("formats --helpp", "unknown argument --helpp; did you mean --help?"),
    ("conformance kitty2", "unknown argument kitty2; did you mean --formats kitty2?"),
    ("conformance everything", "unknown argument everything; see vllm-kvq conformance --help"),
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


FILES = {
    "empty.yaml": "",
    "broken.yaml": "a: [1",
    "good.yaml": "seed: 1",
    "file.gguf": "",
    "options.yaml": "additional-config:\n  kvq:\n    w: 64\n",
    "kqv.yaml": "kv-cache-dtype: kitty2\nadditional-config:\n  kqv:\n    W: 64\n",
    "dtype.yaml": "kv_cache_dtype: kity2\n",
    "valueless.yaml": "kv-cache-dtype:\n",
    "twin.yaml": "additional-config:\n  kvq:\n    W: 64\n    W: 32\n",
    "twins.yaml": "additional-config:\n  kvq:\n    W: 64\n"
    "kv-cache-dtype: kitty2\nadditional-config:\n  kvq:\n    S: 0\n",
}


def _reached(*_: object) -> None:
    raise AssertionError("vLLM would be loaded")


@pytest.mark.parametrize(("command", "sentence"), BAD, ids=[command for command, _ in BAD])
def test_one_sentence(
    command: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(check, "dry_start", _reached)
    with pytest.raises(SystemExit) as exited:
        cli.main(command.split())
    said = capsys.readouterr()
    assert exited.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert sentence in line


def test_the_memory_that_the_environment_names() -> None:
    assert wrong_words(["M"], {"VLLM_CPU_KVCACHE_SPACE": "2GB"}) == (
        "VLLM_CPU_KVCACHE_SPACE is '2GB'; it takes whole GiB, as in VLLM_CPU_KVCACHE_SPACE=4"
    )
    for fine in ("4", ""):
        assert wrong_words(["M"], {"VLLM_CPU_KVCACHE_SPACE": fine}) is None


def test_good_words_have_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both.yaml").write_text("kv-cache-dtype: kitty2\nseed: 1\ntrust-remote-code: true\nlora-modules: []\n")
    good = (
        "Qwen/Qwen3-0.6B --kv-cache-dtype kitty2 --config both.yaml --max-model-len auto --block-size 64",
        "M --max-model-len 25.6k --kv-cache-dtype fp8 --block-size 16",
        'M --kv-cache-dtype kitty2 --additional-config {"kvq":{"keys":"squat","r":8}}',
        'M --additional-config {"kvq":{"key_bits":{"0":4,"*":2},"calibration":"file"}}',
        "--seed 1 M",
        "--kv-cache-dtype fp8 --model .",
        'M --additional-config {"kvq":{"W":64},"other":{"W":1}} --kv-cache-memory-bytes 4G',
    )
    for words in good:
        assert wrong_words(words.split(), {}) is None


def test_a_variable_that_nothing_reads() -> None:
    assert str(variables_problem({"VLLM_KVQ_KERNEL": "torch", "PATH": ""})) == (
        "the environment has VLLM_KVQ_KERNEL, which nothing reads; did you mean VLLM_KVQ_KERNELS?"
    )
    assert variables_problem(dict.fromkeys(VARIABLES, "1")) is None


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("VLLM_KVQ_KERNEL", "torch", "the environment has VLLM_KVQ_KERNEL, which nothing reads; did you mean"),
        ("VLLM_KVQ_KERNELS", "troch", "VLLM_KVQ_KERNELS is 'troch'; did you mean torch?"),
        ("VLLM_KVQ_ISA", "sse", "VLLM_KVQ_ISA is 'sse'; it takes one of portable, avx2, avx512bw, avx512"),
        ("VLLM_KVQ_GPU_PATH", "yes", "VLLM_KVQ_GPU_PATH is 'yes'; it takes one of 0, 1"),
        ("VLLM_CPU_KVCACHE_SPACE", "abc", "VLLM_CPU_KVCACHE_SPACE is 'abc'; it takes whole GiB"),
    ],
)
def test_check_refuses_an_environment_once(
    name: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exited:
        cli.main(["check", "M"])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-kvq check: error: {sentence}")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--verison", "did you mean vllm-kvq --version?"),
        ("--hepl", "did you mean vllm-kvq --help?"),
        ("eval eror", "there is no model or command 'eror'; did you mean vllm-kvq eval error?"),
    ],
)
def test_a_misspelt_command(command: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(sentence)


def test_a_folder_with_the_name_of_nearly_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eror").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["eval", "eror"])  # says that it has no config.json


def test_words_that_were_meant() -> None:
    assert meant("w", ["W_keys", "W", "S"]) == "W"
    assert meant("n", ["m", "N", "M"]) == "N"
    assert meant("M", ["m", "M"]) == "M"
    assert meant("--shape", ["--help"], SURE) is None
    assert meant("rank", ["W"]) is None


def test_no_folder_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "a/b"):
        assert folder(str(tmp_path / name)) == tmp_path / name
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_nothing_loads_vllm_before_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    commands = ("empty", "M --max-model-len 0", "nope.gguf", 'M --additional-config {"kvq":{"w":1}}')
    code = (
        "import sys\nfrom vllm_kvq import cli\nfor words in sys.argv[1:]:\n"
        "    try: cli.main(['check', *words.split()])\n"
        "    except SystemExit as stop: print(words, stop.code, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{words} 2 False" for words in commands], done.stderr
    assert done.returncode == 0, done.stderr


def test_commands_warn_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVQ_KERNEL", "torch")
    assert cli.main(["formats"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-kvq: warning: the environment has VLLM_KVQ_KERNEL, which nothing reads; did you mean")


PARSERS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module).parser()
    print(module, "vllm" in sys.modules)
"""


def test_no_parser_loads_vllm() -> None:
    """So that wrong usage is reported soon. One process makes them all: the first line with True names the culprit."""
    modules = [command.module for command in cli.COMMANDS]
    done = subprocess.run([sys.executable, "-c", PARSERS, *modules], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{module} False" for module in modules], done.stderr


def test_every_variable_is_known() -> None:
    """Those that the sources read, and no others."""
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
    said = capacity_warning(Capacity(273907, 524275, 0.5, 4), 64)
    assert said is not None
    assert said.startswith("requests of 64 tokens are so short that fewer fit than with bf16 (273,907 tokens against")
    assert capacity_warning(Capacity(480000, 524275, 0.92, 4), 64) is None


KEY = torch.randn(64, 2, 64)
HEADS_FIRST = torch.randn(2, 320, 64)
ROUNDTRIPS = {
    "a list": ([[[1.0]]], KEY, None, "key is a list; it must be a torch.Tensor"),
    "an array": (KEY.numpy(), KEY, None, "key is a ndarray; it must be a torch.Tensor"),
    "whole numbers": (KEY, KEY.long(), None, "value is of torch.int64; it must hold floating point numbers"),
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
    """It is asked once, and not for long; where one listens, vLLM looks the name up."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert str(hub.hub_problem("smollm2")) == (
            f"there is no folder smollm2, and no such model in the hub's cache, and {constants.ENDPOINT} can't be "
            "reached; name a folder, or another hub with HF_ENDPOINT"
        )
        listening.listen()
        assert hub.hub_problem("smollm3") is None
        monkeypatch.setattr(hub, "SECONDS", 0.2)
        for mute in ("http://192.0.2.1", "http://name.invalid"):  # addresses and names that nobody has
            hub.hub_problem.cache_clear()
            monkeypatch.setattr(constants, "ENDPOINT", mute)
            assert f"{mute} can't be reached" in str(hub.hub_problem("smollm2"))


@pytest.mark.usefixtures("no_cache")
def test_a_hub_that_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(socket, "create_connection", asked)
    for fine in (str(tmp_path), "s3://bucket/model", "a/model:Q4_K_M"):
        assert hub.hub_problem(fine) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "; name a folder, or unset HF_HUB_OFFLINE" in str(hub.hub_problem("smollm2"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert hub.hub_problem("smollm4") is None
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setattr(weights, "weights_folder", lambda name, revision: tmp_path if name == "a/model" else None)
    assert hub.hub_problem("a/model") is None
    assert hub.hub_problem("a/model/model-Q4_K_M.gguf") is None
    with pytest.raises(AssertionError, match="the hub is asked"):
        hub.hub_problem("b/model/model-Q4_K_M.gguf")
