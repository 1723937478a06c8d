"""docs/adding-a-format.md: every command runs as it stands, and every excerpt is in the example."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from pathlib import Path

import example_format
import pages
import pytest
import torch
import traces
from completions import complete

from proof.demo.capacity import parse_capacity
from vllm_kvq.bench.servers.server import Server
from vllm_kvq.eval import peers
from vllm_kvq.formats.parts import planes

pytestmark = pytest.mark.engine
PAGE = "docs/adding-a-format.md"
DOC = (pages.ROOT / PAGE).read_text(encoding="utf-8")
SAID = {
    "vllm-kvq formats --head-size": r"int4_hadamard +5\.0625 (?s:.*)int4_hadamard +rotated keys, 4 bits",
    "vllm-kvq formats --options": r"hadamard_group +rotated channels that share a scale +\d+ +hadamard +16, 32",
    "python -c": r"tensor\(",
    "python -m proof fuzz": r"int4_hadamard +\d+ +\d+ .* 0\n",
    "vllm-kvq eval error": r"int4_hadamard +5\.00",
    "vllm-kvq eval demo": r"int4_hadamard +5\.06 ",
    "vllm-kvq bench attention": r"int4_hadamard has no C\+\+ kernels .*: the PyTorch kernels are timed",
}
"""What each command must print, in addition to succeeding."""
SERVE = "vllm serve "


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, flags=re.M | re.S)


def commands() -> list[str]:
    return [command.text for command in pages.commands(PAGE)]


def test_excerpts() -> None:
    code = (example_format.SOURCE / "int4_hadamard.py").read_text()
    project = (example_format.SOURCE / "pyproject.toml").read_text()
    assert len(blocks("python")) == 3
    assert all(block in code for block in blocks("python"))
    assert all(block in project for block in blocks("toml"))
    said = re.search(r"a package of (\d+) lines", DOC)
    assert said
    assert int(said[1]) == len((code + project).splitlines()) < 150


def test_the_peers_are_listed() -> None:
    (listed,) = re.findall(r"other projects' methods, as they ship: (.*?)\.\n", DOC, flags=re.S)
    assert re.findall(r"`(\w+)`", listed) == [peer.name for peer in peers.FORMATS]


def test_codes_lie_in_planes_as_the_page_says() -> None:
    """The byte of keys and of values that holds each channel's code, and where in it."""
    sentence = r"At d = (\d+) and (\d) bits, the first byte of a token has the codes of channels (.*?), from"
    (said,) = re.findall(sentence, " ".join(DOC.split()))
    d, bits, channels = int(said[0]), int(said[1]), [*map(int, re.findall(r"\d+", said[2]))]
    codes = torch.zeros(planes.SLAB, d, dtype=torch.uint8)
    codes[0, channels] = torch.tensor(range(len(channels)), dtype=torch.uint8)
    expected = sum(plane << bits * plane for plane in range(len(channels)))
    packed = planes.pack_keys(codes, bits)
    assert packed[0, 0, 0] == expected
    assert packed.sum() == expected
    assert planes.pack_values(codes, bits)[0, 0, 0] == expected
    named = re.findall(r"`((?:csrc|triton_kernels|vllm_kvq)/[\w./]+)`", DOC)
    assert "vllm_kvq/formats/parts/planes.py" in named
    assert [path for path in named if not (pages.ROOT / path).exists()] == []


@pytest.mark.wide
def test_every_command(tmp_path: Path) -> None:
    """In a directory with nothing but the example; what it installs goes into another folder."""
    installed, work = tmp_path / "installed", tmp_path / "work"
    (work / "examples").mkdir(parents=True)
    subprocess.run(["cp", "-r", example_format.SOURCE, work / "examples"], check=True)
    environment = {**example_format.environment(installed), **example_format.offline(installed)}
    left = dict(SAID)
    for command in commands():
        if command.startswith(SERVE):
            continue
        run = subprocess.run(
            ["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True, timeout=500
        )
        assert run.returncode == 0, f"{command}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
        for start in [s for s in left if command.startswith(s)]:
            assert re.search(left.pop(start), run.stdout), f"{command}\n{run.stdout}"
    assert not left


@pytest.mark.wide
def test_the_served_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the document, except for the model; the workers know the format and its option, too."""
    monkeypatch.setenv("PYTHONPATH", example_format.environment(example_format.install(tmp_path))["PYTHONPATH"])
    request = traces.prefixes(64)[0].requests[0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (command,) = [shlex.split(c) for c in commands() if c.startswith(SERVE)]
    assert command[2] == "MODEL"
    arguments = [*command[3:], "--enforce-eager", "--served-model-name", "tiny"]
    arguments += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "64"]
    with Server(str(model), arguments, "127.0.0.1", port, tmp_path / "log") as server:
        server.wait_until_healthy(240)
        answers = [complete(server.url, request.prompt, request.max_tokens) for _ in range(2)]
        assert all(len(tokens) == request.max_tokens for tokens in answers)
        capacity = parse_capacity(server.read_log())
        assert capacity is not None
        assert capacity.format == "int4_hadamard:hadamard_group=16"
        assert capacity.bits == 5.625, "5.125 with groups of 32"
        assert server.stop() == 0
