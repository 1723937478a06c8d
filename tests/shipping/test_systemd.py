"""docker/vllm-kvq.service: systemd accepts it, vLLM knows its command, and it restarts after exit status 0, too."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from serve_arguments import parse_serve

from vllm_kvq.formats.budgets import RECOMMENDED

ROOT = Path(__file__).resolve().parents[2]
UNIT, PAGE = ROOT / "docker" / "vllm-kvq.service", ROOT / "docs" / "operating.md"


@pytest.fixture(scope="module")
def unit() -> ConfigParser:
    """With all Environment= lines joined into one, since ConfigParser has one value for a key."""
    text = UNIT.read_text()
    assignments = re.findall("^Environment=(.*)\n", text, re.MULTILINE)
    text = re.sub("^Environment=.*\n", "", text, flags=re.MULTILINE)
    parser = ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    parser["Service"]["Environment"] = " ".join(assignments)
    return parser


def environment(unit: ConfigParser) -> dict[str, str]:
    return dict(assignment.split("=", 1) for assignment in shlex.split(unit["Service"]["Environment"]))


def command(line: str, variables: dict[str, str]) -> list[str]:
    """As systemd reads it: ${NAME} is one argument, and $NAME as many as it has words."""
    words = []
    for word in line.split():
        if re.fullmatch(r"\$[A-Z_]+", word):
            words += shlex.split(variables[word[1:]])
        else:
            words.append(re.sub(r"\$\{([A-Z_]+)\}", lambda found: variables[found[1]], word))
    return words


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_accepts(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/vllm-kvq/bin/vllm", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_restarts_whatever_the_exit_status_was(unit: ConfigParser) -> None:
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert not {"RestartPreventExitStatus", "SuccessExitStatus", "RestartForceExitStatus"} & set(service)
    assert int(unit["Unit"]["StartLimitBurst"]) > 1


def test_it_has_limits(unit: ConfigParser) -> None:
    assert {"MemoryMax", "LimitNOFILE", "LimitMEMLOCK"} <= set(unit["Service"])


@pytest.mark.parametrize("options", [None, """--max-model-len 4096 --additional-config '{"kvq": {"W": 64}}'"""])
def test_vllm_knows_the_command(options: str | None, unit: ConfigParser) -> None:
    variables = environment(unit) | ({} if options is None else {"OPTIONS": options})
    path, *arguments = command(unit["Service"]["ExecStart"], variables)
    assert path == "/opt/vllm-kvq/bin/vllm"
    parsed = parse_serve([os.path.basename(path), *arguments])
    assert (parsed.model_tag, parsed.kv_cache_dtype) == ("Qwen/Qwen3-0.6B", RECOMMENDED)
    assert (parsed.host, parsed.port) == ("127.0.0.1", 8000)
    assert parsed.max_model_len == (None if options is None else 4096)
    # systemd kills what is left after TimeoutStopSec
    assert 0 < parsed.shutdown_timeout < int(unit["Service"]["TimeoutStopSec"])


@pytest.mark.parametrize("fault", ["--shutdown-timeuot", "--kv-cache-dtyp"])
def test_a_wrong_flag_is_found(fault: str, unit: ConfigParser) -> None:
    _, *arguments = command(unit["Service"]["ExecStart"], environment(unit))
    with pytest.raises(SystemExit):
        parse_serve(["vllm", *arguments, fault + "=1"])


def test_the_page_names_what_is_there(unit: ConfigParser) -> None:
    text = PAGE.read_text()
    for path in ("/etc/vllm-kvq/environment", "/opt/vllm-kvq", "docker/vllm-kvq.service"):
        assert path in text
    (example,) = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    names = set(re.findall("^([A-Z_]+)=", example, re.MULTILINE))
    assert names <= set(environment(unit)) | {"HF_TOKEN", "VLLM_API_KEY"}
    assert unit["Service"]["EnvironmentFile"] == "-/etc/vllm-kvq/environment"
    assert f"useradd --system {unit['Service']['User']}" in text
