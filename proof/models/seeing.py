"""Tiny models that see pictures: what turns these into tokens, and prompts that contain them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

from proof.models import named
from proof.models.architecture import VOCAB, Architecture
from proof.oracle.pictures import HEIGHT, WIDTH
from proof.oracle.trace import Picture, Request
from vllm_kvq.bench.models.tokenizer import byte_level

FIRST_BYTE = 8
"""The token of the first byte, after all special ones."""


@dataclass(frozen=True)
class Seeing:
    """A kind of model that sees pictures."""

    arch: Architecture
    token: int
    """Stands for pictures in prompts."""
    tokens: int
    """Tokens of each picture."""
    write: Callable[[Path, int], None]
    """Adds to a checkpoint what turns images into tokens."""

    def complete(self, path: Path) -> None:
        """Adds to a checkpoint what turns images into tokens."""
        self.write(path, self.token)

    def prompt(self, parts: Sequence[int | tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """`parts`: words, or the seed of a picture."""
        prompt: list[int] = []
        pictures = []
        for part in parts:
            if isinstance(part, int):
                pictures.append(Picture(part, len(prompt), self.tokens))
                prompt += [self.token] * self.tokens
            else:
                prompt += part
        return tuple(prompt), tuple(pictures)

    def shows(self, request: Request) -> bool:
        """Whether its prompt has the token that stands for pictures exactly where they are."""
        places = [i for p in request.pictures for i in range(p.at, p.at + p.tokens)]
        whole = all(p.tokens == self.tokens for p in request.pictures)
        return whole and places == [i for i, word in enumerate(request.prompt) if word == self.token]

    def request(self, name: str, parts: Sequence[int | tuple[int, ...]], max_tokens: int, arrival: int = 0) -> Request:
        prompt, pictures = self.prompt(parts)
        return Request(name, prompt, max_tokens, arrival, pictures=pictures)


def tokenizer(special: dict[int, str]) -> Any:
    """Bytes, so that it knows the text to which constants are fitted, then made-up words; `special` by their ids."""
    from transformers import PreTrainedTokenizerFast

    known = dict(enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), FIRST_BYTE)) | special
    made = byte_level(models.BPE(vocab={known.get(i, f"w{i}"): i for i in range(VOCAB)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=list(special.values()))


SIZE = 112
"""Pixels of what LLaVA sees of a picture, wide and high."""


def write_llava(path: Path, image_token: int) -> None:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, tokenizer({image_token: "<image>"}), **how).save_pretrained(path)
    # the vision encoder's weights, as checkpoints name them: this Transformers leaves out a part of the names
    file = path / "model.safetensors"
    weights = load_file(file)
    published = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in weights.items()}
    save_file(published, file, metadata={"format": "pt"})


def write_qwen2_vl(path: Path, image_token: int) -> None:
    from transformers import Qwen2VLImageProcessorPil

    special = {4: "<|vision_start|>", 5: "<|vision_end|>", image_token: "<|image_pad|>", 7: "<|video_pad|>"}
    tokenizer(special).save_pretrained(path)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": WIDTH * HEIGHT}).save_pretrained(path)


def seeing(name: str, tokens: int, write: Callable[[Path, int], None], **encoder: int) -> Seeing:
    """The row of docs/models.md, with another image encoder and without the flag that disables images."""
    row = named(name)
    numbers = {**row.numbers, "vision_config": {**row.numbers["vision_config"], **encoder}}
    engine = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    arch = replace(row, name=f"{name} with images", numbers=numbers, engine=engine)
    return Seeing(arch, arch.build().image_token_id, tokens, write)


LLAVA = seeing("LLaVA", (SIZE // 14) ** 2, write_llava, image_size=SIZE)
QWEN2_VL = seeing("Qwen2-VL", (WIDTH // 28) * (HEIGHT // 28), write_qwen2_vl)
SEEING = {seeing.arch.name: seeing for seeing in (LLAVA, QWEN2_VL)}
