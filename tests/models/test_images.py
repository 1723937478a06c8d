"""Prompts with images: their tokens are keys and values like any other, shared among requests of the same image."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
from images import SIZE, name_as_published, show_images, write_llava_processor
from lab import Lab
from test_works import ENGINE, LOSSLESS, kvq

from proof.models import named
from proof.models.architecture import vision
from proof.models.checkpoints import PROMPT_TOKENS
from proof.oracle.compare import compare_all
from proof.oracle.trace import Request, Result, Trace

pytestmark = pytest.mark.engine
LLAVA = named("LLaVA")
TOKEN = LLAVA.numbers["image_token_index"]
VISION = {**vision("clip_vision_model", projection_dim=64), "image_size": SIZE}
ARCH = replace(LLAVA, name="LLaVA with images", numbers={**LLAVA.numbers, "vision_config": VISION}, engine={})


def traces() -> list[Trace]:
    """64 tokens of an image in prompts of one and two chunks; again, with another image, and before other words."""
    rng = random.Random(6)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(PROMPT_TOKENS) for _ in range(count))

    before, after, other = words(40), words(50), words(30)
    seen = (*before, TOKEN, *after)
    return [
        Trace((Request("cold 1", seen, 24), Request("text 0", words(70), 24), Request("short 2", (TOKEN, 9), 24))),
        Trace((Request("again 1", seen, 24), Request("other image 2", seen, 24, arrival=1))),
        Trace((Request("other words 1", (*before, TOKEN, *other), 24),)),
    ]


TODO = traces()


def run(lab: Lab, **engine: Any) -> list[Result]:
    path = lab.model(ARCH)
    if not (path / "tokenizer.json").exists():
        write_llava_processor(path, TOKEN)
        name_as_published(path)
    shown = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    return lab.run(ARCH, TODO, prepare=functools.partial(show_images, TOKEN), **{**ENGINE, **shown, **engine})


def test_images(lab: Lab) -> None:
    expected = run(lab, kv_cache_dtype="auto")
    got = run(lab, **LOSSLESS)
    total = compare_all(TODO, expected, got)
    assert not total.mismatches
    assert total.tokens == 6 * 24
    hits = {name: tokens for result in got for name, tokens in result.cached.items() if tokens}
    # what stands before the image is found with any image; the last 32 tokens are computed anew
    assert hits == {"again 1": 96, "other image 2": 32, "other words 1": 96}
    # the image is seen
    assert got[1].outputs["again 1"] != got[1].outputs["other image 2"]
    lossy = run(lab, **kvq("squat2"))
    assert all(len(samples[0]) == 24 for result in lossy for samples in result.outputs.values())
    assert lossy[0].outputs["cold 1"] != expected[0].outputs["cold 1"]
