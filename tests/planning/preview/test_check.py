"""`vllm-kvq check` says what `vllm serve` would do: yes or the same sentence, what is packed, slow, how much fits."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.demo.capacity import parse_capacity
from vllm_kvq import cli
from vllm_kvq.bench.models.random_model import random_model
from vllm_kvq.formats import FORMATS
from vllm_kvq.integration.plan import memory
from vllm_kvq.integration.preview import dry_start
from vllm_kvq.integration.worker import report

pytestmark = pytest.mark.engine
Check = Callable[..., dict[str, Any]]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def loud_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command makes its own process quiet, and asks for memory once; here it is the tests' process."""
    memory._problem.cache_clear()
    for variable in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.delenv(variable, raising=False)
    levels = {name: logging.getLogger(name).level for name in ("vllm", "vllm_kvq", "transformers")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger("vllm_kvq").handlers.clear()


@pytest.fixture
def checked(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """The JSON document; its exit code agrees with it."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def go(*arguments: str, model_path: Path = model) -> dict[str, Any]:
        status = cli.main(["check", str(model_path), *arguments, "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == (0 if document["starts"] else 1)
        return document

    return go


def test_yes(checked: Check) -> None:
    found = checked("--kv-cache-dtype", "innerq2", "--max-model-len", "1024", "--block-size", "64")
    fmt = FORMATS["innerq2"]
    assert found["starts"]
    assert found["sentence"] is None
    assert (found["format"], found["N"], found["W"], found["S"]) == ("innerq2", 64, 96, 32)
    assert found["bits_per_element"] == fmt.bits_per_element(64, 64)
    assert found["layers"] == {"packed": 2, "all": 2, "not_packed": []}
    assert found["kernels"]["path"] == "C++"
    assert found["kernels"]["slow"] is None
    assert found["memory"]["bytes"] == GIB
    assert found["capacity"]["request_tokens"] == 1024
    # sidecars take their share
    assert 2 < found["capacity"]["tokens"] / found["capacity"]["bf16_tokens"] < 16 / found["bits_per_element"]


def test_sinks_are_a_block_of_a_request(checked: Check, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, and none without them: the capacity is that of requests with and without that block."""
    arguments = ["--kv-cache-dtype", "kitty2", "--max-model-len", "1024", "--block-size", "128"]
    found = checked(*arguments)
    assert (found["S"], found["request_blocks"]["sinks"]) == (4, 1)
    without = checked(*arguments, "--additional-config", '{"kvq": {"S": 0}}')
    assert without["S"] == 0
    assert without["request_blocks"] == {**found["request_blocks"], "sinks": 0}
    pages, sidecar = (found["request_blocks"][what] for what in ("pages", "sidecar"))
    assert pages == 8
    ratio = without["capacity"]["tokens"] / found["capacity"]["tokens"]
    assert ratio == pytest.approx((pages + sidecar + 1) / (pages + sidecar), rel=1e-3)
    assert cli.main(["check", str(model), *arguments]) == 0
    said = f"{pages + sidecar + 1} blocks of the pool: {pages} for pages, {sidecar} for sidecar, 1 for sinks\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("length", "fewer"), [("64", True), ("1024", False)])
def test_requests_too_short_to_gain_anything_are_in_the_verdict(
    length: str, fewer: bool, checked: Check, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--kv-cache-dtype", "kitty2", "--max-model-len", length]
    found = checked(*arguments)
    assert found["starts"]
    assert (found["fewer_tokens"] is not None) == fewer
    assert cli.main(["check", str(model), *arguments]) == 0
    verdict = capsys.readouterr().out.splitlines()[0]
    but = f", but requests of {length} tokens are so short that fewer fit than with bf16 ("
    assert verdict.startswith("yes, it would start here" + but * fewer)
    assert (verdict == "yes, it would start here") == (not fewer)


def test_what_is_not_packed(checked: Check) -> None:
    options = '{"kvq": {"skip_layers": [1], "group": 16}}'
    found = checked("--kv-cache-dtype", "squat2", "--max-model-len", "256", "--additional-config", options)
    assert found["layers"] == {"packed": 1, "all": 2, "not_packed": ["1"]}
    assert found["kernels"]["slow"].endswith("its values with group=16; leave out 'group'")


def test_a_slow_head_size_is_said(checked: Check, tmp_path: Path) -> None:
    wide = random_model(tmp_path / "wide", hidden=96, layers=1, heads=1, kv_heads=1, head_dim=512)
    found = checked("--kv-cache-dtype", "polar4", "--max-model-len", "512", model_path=wide)
    assert found["starts"]
    assert "at head size 512 (they do at 64, 80, 96, 112, 128, 192 and 256)" in found["kernels"]["slow"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'],
            "--kv-cache-dtype squat2 does not support the KV connector ExampleConnector, which has one block table per",
        ),
        (["--max-model-len", "100000"], "is greater than the derived max_model_len"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    ],
)
def test_no(arguments: list[str], sentence: str, checked: Check) -> None:
    """Our refusals and vLLM's own, each printed as a single line and nothing else."""
    found = checked("--kv-cache-dtype", "squat2", *arguments)
    assert {*found} == {"starts", "sentence"}
    assert not found["starts"]
    assert sentence in found["sentence"]
    assert "\n" not in found["sentence"]
    assert "validation error" not in found["sentence"]
    assert "pydantic" not in found["sentence"]


def test_too_little_memory(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--kv-cache-dtype", "squat2", "--max-model-len", "256")
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(100 * GIB, 3 * GIB))
    assert checked(*arguments)["starts"]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert checked(*arguments)["sentence"] == (
        "the cache is set to 4.0 GiB, but 3.0 GiB of 100.0 GiB are free; "
        "set a limit, for example --kv-cache-memory-bytes 1G"
    )
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert checked(*arguments)["sentence"].startswith(
        "vLLM would take 92% of this machine's memory (92.0 GiB), but 3.0"
    )
    memory._problem.cache_clear()
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(GIB, GIB))
    assert checked(*arguments)["sentence"].startswith("nothing is left for the cache: 92% of 1.0 GiB, less ")
    found = checked(*arguments, "--kv-cache-memory-bytes", "100000")
    assert found["sentence"].startswith("a request of 256 tokens takes ")
    assert found["sentence"].endswith("lower --max-model-len or give the cache more memory")


def test_weights_that_do_not_fit(checked: Check, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a cache that would fit by itself. float32 is loaded in 16 bits."""
    arguments = ("--kv-cache-dtype", "kitty2", "--max-model-len", "256")
    monkeypatch.setattr(memory.Machine, "here", lambda: memory.Machine(100 * GIB, 3 * GIB))
    monkeypatch.setattr(memory, "checkpoint_bytes", lambda model: 5 * GIB)
    assert checked(*arguments)["sentence"] == (
        "2.5 GiB of weights and 1.0 GiB of cache do not fit, because 3.0 GiB of 100.0 GiB are free; "
        "give the cache less with --kv-cache-memory-bytes, or serve a smaller model"
    )
    monkeypatch.setattr(memory, "checkpoint_bytes", lambda model: 4 * GIB)
    assert checked(*arguments)["starts"]


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("model.safetensors", "has no weights (*.safetensors, *.bin, *.pt, *.gguf); download them"),
        ("tokenizer*", "has no tokenizer (tokenizer.json, "),
    ],
)
def test_files_that_are_missing(lost: str, sentence: str, checked: Check, model: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(model, tmp_path / "model")
    for path in whole.glob(lost):
        path.unlink()
    found = checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256", model_path=whole)
    assert sentence in found["sentence"]
    flag = ("--load-format", "dummy") if "weights" in sentence else ("--skip-tokenizer-init",)
    assert checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256", *flag, model_path=whole)["starts"]


def test_a_shard_that_is_missing(checked: Check, model: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(model, tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    found = checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256", model_path=whole)
    assert found["sentence"].endswith("lacks model-00002-of-00002.safetensors; download the checkpoint again")
    # an index of weights of another kind, whose files were left out on purpose
    index["weight_map"]["b"] = "pytorch_model-00001-of-00001.bin"
    (whole / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (whole / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256", model_path=whole)["starts"]


def test_what_options_make_of_a_format_is_named(
    checked: Check, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An options file of another format leaves the name on the command line, and its codecs."""
    config = Path(__file__).parents[3] / "configs" / "squat4.yaml"
    found = checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256", "--config", str(config))
    assert found["format"] == "kitty2"
    assert found["label"].startswith("kitty2:")
    assert {"keys=squat", "key_bits=4"} <= {*found["label"].removeprefix("kitty2:").split(",")}
    arguments = ["--kv-cache-dtype", "kitty2", "--max-model-len", "256", "--config", str(config)]
    served = dry_start.dry_start([str(model), *arguments]).served
    assert f"format={found['label']} " in report.start_line(served, 1000)
    assert cli.main(["check", str(model), *arguments]) == 0
    assert f"layers, as {found['label']}\n" in capsys.readouterr().out
    assert checked("--kv-cache-dtype", "kitty2", "--max-model-len", "256")["label"] == "kitty2"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kv-cache-dtype", "squat2"], "name a model"),
        (["HERE", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype is 'fp8'"),
        (["HERE", "--kv-cache-dtype", "squat2", "--no-such-flag"], "unknown argument --no-such-flag; vllm serve"),
        (["HERE", "--max-modle-len", "5"], "unknown argument --max-modle-len; did you mean --max-model-len?"),
        (["--seed", "1", "MODEL", "--kv-cache-dtype", "kitty2"], "there is no folder MODEL, and no such model in the"),
        (["MODEL", "--kv-cache-dtype", "kitty2"], "there is no folder MODEL, and no such model in the hub's cache"),
        (["MODEL", "--kv-cache-dtype", "squat3"], "there is no format 'squat3'; did you mean squat4?"),
    ],
)
def test_wrong_usage(arguments: list[str], error: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["check", *(str(model) if word == "HERE" else word for word in arguments)])
    assert exited.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert error in line
    assert line.startswith("vllm-kvq check: error: ")
    assert "lossless" not in said.err


def test_a_test_format_is_taken_and_not_listed(capsys: pytest.CaptureFixture[str], checked: Check) -> None:
    parser, _ = dry_start.serve_parser()
    (action,) = (
        a for s in parser._subparsers._group_actions[0].choices.values() for a in s._actions  # type: ignore[union-attr]
        if a.dest == "kv_cache_dtype"
    )  # fmt: skip
    assert {"squat2", "fp8", "auto"} <= {*action.choices}
    assert "lossless" not in [*action.choices]
    assert "lossless" in action.choices
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--help=kv-cache-dtype"])
    listed = capsys.readouterr().out
    assert "squat2" in listed
    assert "lossless" not in listed
    assert checked("--kv-cache-dtype", "lossless", "--max-model-len", "256")["starts"]


@pytest.mark.parametrize(
    ("installed", "variable", "sentence"),
    [
        ([], None, "the plugin is not installed, only its sources are on the path"),
        (["kvq"], "other", "VLLM_PLUGINS is 'other' and leaves 'kvq' out"),
        (["kvq"], "other,kvq", None),
        (["kvq"], None, None),
    ],
)
def test_the_plugin(
    installed: list[str], variable: str | None, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Points:
        names = frozenset(installed)

    monkeypatch.setattr(dry_start, "entry_points", lambda group: Points)
    if variable is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", variable)
    found = dry_start.plugin_problem()
    assert found is None if sentence is None else str(found).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "variable", "sentence"),
    [
        ("--kv-cache-dtype kity2", "1", "--kv-cache-dtype: there is no format 'kity2'; did you mean kitty2?"),
        ("--kv-cache-dtype zzz", "1", "invalid choice: 'zzz'"),
        ("--kv-cache-dtype kitty2", "abc", "VLLM_CPU_KVCACHE_SPACE is 'abc'; it takes whole GiB, as in "),
    ],
)
def test_what_vllm_serve_itself_says(
    words: str, variable: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of `vllm serve`, which is made after plugins have registered."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvq.integration import plugin

    plugin.register()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    parser = FlexibleArgumentParser(prog="vllm")
    (serve,) = cmd_init()

    def parsed() -> None:
        serve.subparser_init(parser.add_subparsers(dest="subparser"))
        parser.parse_args(["serve", "M", *words.split()])

    with pytest.raises(SystemExit) as exited:
        parsed()
    assert exited.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert sentence in last
    assert last.startswith("vllm serve: error: ")


def test_the_text_says_the_same(checked: Check, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--kv-cache-dtype",
        "polar4",
        "--max-model-len",
        "256",
        "--additional-config",
        '{"kvq": {"values": "raw"}}',
    ]
    found = checked(*arguments)
    assert cli.main(["check", str(model), *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"yes, it would start here, but {found['fewer_tokens']}\n")
    for said in (
        found["kernels"]["slow"],
        f"{found['bits_per_element']:.3f} with all parameters",
        f"{found['capacity']['tokens']:,} tokens",
        f"bf16: {found['capacity']['bf16_tokens']:,}",
        "2 of 2 layers, as polar4:values=raw",
        "C++ (",
    ):
        assert said in text
    assert cli.main(["check", str(model), "--kv-cache-dtype", "squat2", "--max-model-len", "100000"]) == 1
    assert capsys.readouterr().out.startswith("no: ")


def test_options_by_layer(checked: Check, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = '{"kvq": {"m": {"0": 512, "*": 128}}}'
    arguments = ["--kv-cache-dtype", "qjl3", "--max-model-len", "256", "--additional-config", options]
    parts = checked(*arguments)["by_layer"]
    assert [part.split(", bits=")[0] for part in parts] == ["layer 0: m=512", "layer 1: m=128"]
    assert cli.main(["check", str(model), *arguments]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in parts)


def test_the_capacity_is_the_start_lines(checked: Check, model: Path) -> None:
    """For the blocks that vLLM makes of that memory: bytes of the pool / bytes of a page in all layers of a group."""
    found = checked("--kv-cache-dtype", "squat2", "--max-model-len", "256")
    served = dry_start.dry_start([str(model), "--kv-cache-dtype", "squat2", "--max-model-len", "256"]).served
    line = parse_capacity(report.start_line(served, GIB // (2 * served.page_bytes)))
    assert line is not None
    assert (line.tokens, line.bf16_tokens) == (found["capacity"]["tokens"], found["capacity"]["bf16_tokens"])


def test_a_whole_process_is_quiet(model: Path) -> None:
    command = [sys.executable, "-m", "vllm_kvq", "check", str(model), "--kv-cache-dtype", "squat2", "--json"]
    command += ["--kv-cache-memory-bytes", "10000000", "--max-model-len", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["starts"]


@pytest.mark.wide
def test_verbose_lets_vllm_log(model: Path) -> None:
    command = [sys.executable, "-m", "vllm_kvq", "check", str(model), "--kv-cache-dtype", "squat2", "--verbose"]
    command += ["--kv-cache-memory-bytes", "10000000", "--max-model-len", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "INFO" in done.stderr
    assert done.stdout.startswith("yes, ")
    assert "INFO" not in done.stdout
