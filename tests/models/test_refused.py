"""Models that are refused: one sentence, before weights load, in the process that the user sees."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from lab import Lab

from proof.models import REFUSED, named
from proof.models.architecture import Architecture

pytestmark = pytest.mark.engine


def refusal(lab: Lab, arch: Architecture, kv_cache_dtype: str) -> str | None:
    engine = {"max_model_len": 256, "dtype": arch.dtype, **arch.engine}
    vision = arch.model if arch.vision else None
    return lab.refusal(lab.config(arch), vision, **engine, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("arch", REFUSED, ids=lambda a: a.name)
def test_one_sentence(arch: Architecture, lab: Lab) -> None:
    sentence = refusal(lab, arch, "squat2")
    assert sentence is not None
    assert f"--kv-cache-dtype squat2{'' if 'head size' in arch.refused else ' does not support'}" in sentence
    assert arch.refused in sentence
    # and not because of something else: plain vLLM takes this configuration
    assert refusal(lab, arch, "auto") is None


IMAGES = [arch for arch in REFUSED if "images" in arch.name]


@pytest.mark.parametrize("arch", IMAGES, ids=lambda a: a.name)
def test_text_alone_is_the_way_out(arch: Architecture, lab: Lab) -> None:
    way_out = "serve only text with --language-model-only, or use --kv-cache-dtype auto"
    embeddings = way_out.replace("-only,", "-only without --enable-mm-embeds,")
    config = functools.partial(lab.refusal, lab.config(arch), arch.model, kv_cache_dtype="squat2", max_model_len=256)
    what = "Refused: --kv-cache-dtype squat2 does not support attention in both directions among image tokens; "
    assert config() == what + way_out
    assert config(language_model_only=True) is None
    # the same, flag by flag
    assert config(limit_mm_per_prompt={"image": 0, "video": 0}) is None
    # embeddings of images are refused like images
    assert config(language_model_only=True, enable_mm_embeds=True) == what + embeddings


@pytest.mark.wide
def test_the_command_prints_just_the_sentence(lab: Lab) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(lab.config(named("Mistral v0.1")))]
    done = subprocess.run(
        [*command, "--kv-cache-dtype", "squat2", "--skip-tokenizer-init"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode not in (0, None)
    said = done.stderr + done.stdout
    assert "Traceback" not in said
    assert (
        "vllm-kvq: --kv-cache-dtype squat2 does not support models in which all layers have sliding-window "
        "attention; use --kv-cache-dtype auto" in done.stderr.splitlines()[-1]
    )


def test_a_layer_that_does_not_get_the_dtype_is_refused() -> None:
    """The second check, after the configuration's: models that do not pass on the dtype, such as Falcon."""
    from types import SimpleNamespace

    from vllm_kvq.integration.platform import check_other_layer
    from vllm_kvq.problem import Refused

    def cache(*skip: str) -> SimpleNamespace:
        return SimpleNamespace(cache_dtype="squat2", kv_cache_dtype_skip_layers=list(skip))

    windowed, full = (SimpleNamespace(has_sliding_window=w) for w in (True, False))
    check_other_layer(cache("sliding_window"), windowed)
    check_other_layer(cache("1"), full)
    for skip, asked in (((), windowed), ((), full), (("sliding_window",), full)):
        with pytest.raises(Refused, match="does not reach an attention layer of this model"):
            check_other_layer(cache(*skip), asked)
