"""configs/<format>.yaml: one per public format, each with exactly the defaults of that format."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_arguments import parse_serve

from vllm_kvq import FORMATS

yaml = pytest.importorskip("yaml", reason="comes with vLLM")

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLIC = [name for name, entry in FORMATS.items() if entry.public]


def test_one_file_per_public_format() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_file_states_the_defaults(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert set(config) == {"kv-cache-dtype", "additional-config"}
    assert config["kv-cache-dtype"] == name
    options = config["additional-config"]["kvq"]
    assert options, "an empty list of options would pass the comparison below and say nothing"
    assert FORMATS[name].settings(options) == FORMATS[name].settings()


def test_vllm_reads_it_as_our_options() -> None:
    """`--config` turns the nested mapping into the JSON argument that --additional-config takes."""
    pytest.importorskip("vllm")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = FlexibleArgumentParser().load_config_file(str(CONFIGS / "squat2.yaml"))
    assert arguments[:2] == ["--kv-cache-dtype", "squat2"]
    assert arguments[2] == "--additional-config"
    assert FORMATS["squat2"].settings(yaml.safe_load(arguments[3])["kvq"]) == FORMATS["squat2"].settings()


def test_it_joins_a_file_of_the_users_own(tmp_path: Path) -> None:
    """As docs/serving.md says: one after the other, in either order, and flags take precedence."""
    pytest.importorskip("vllm")
    mine, ours = "max-model-len: 2048\nseed: 7\n", (CONFIGS / "kitty2.yaml").read_text(encoding="utf-8")
    for text in (mine + ours, ours + mine):
        (both := tmp_path / "both.yaml").write_text(text, encoding="utf-8")
        parsed = parse_serve(["vllm", "serve", "model", "--config", str(both), "--seed", "8"])
        assert (parsed.kv_cache_dtype, parsed.max_model_len, parsed.seed) == ("kitty2", 2048, 8)
        assert FORMATS["kitty2"].settings(parsed.additional_config["kvq"]) == FORMATS["kitty2"].settings()
