"""Pictures in prompts: vLLM's prompt, and the inputs of the reference's network for the tokens that represent them.

vLLM takes one placeholder for an image and puts as many tokens in its place as the image needs. A Request has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from proof.oracle.trace import Picture, Request

WIDTH, HEIGHT = 280, 168


def drawn(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def prompt_of(request: Request) -> dict[str, Any]:
    """As vLLM takes it."""
    tokens = list(request.prompt)
    if not request.pictures:
        return {"prompt_token_ids": tokens}
    for p in reversed(request.pictures):
        del tokens[p.at + 1 : p.at + p.tokens]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": [drawn(p.seed) for p in request.pictures]}}


class Shown:
    """The inputs of a Transformers model of images and text for the tokens of requests."""

    def __init__(self, path: str, network: Any) -> None:
        self.path, self.network = path, network
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.placed: dict[Request, tuple[torch.Tensor, int]] = {}

    def inputs(
        self, tokens: torch.Tensor, position: torch.Tensor, rows: Sequence[tuple[Request | None, slice]]
    ) -> dict[str, torch.Tensor]:
        """`rows`: which of the tokens, at these positions of their requests, are a request's."""
        embedded = self.network.get_input_embeddings()(tokens)
        three = hasattr(self.network.model, "get_rope_index")
        turned = position.expand(3, -1).clone() if three else position
        for request, mine in rows:
            if request is None or not request.pictures:
                continue
            for p in request.pictures:
                behind = position[mine] - p.at
                inside = (behind >= 0) & (behind < p.tokens)
                embedded[mine][inside] = self._features(p)[behind[inside]]
            if three:
                turned[:, mine] = self._turned(request, position[mine])
        return {"inputs_embeds": embedded[None], "position_ids": turned[:, None] if three else turned[None]}

    def _see(self, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A picture's features, and into how many pieces it is cut, where RoPE asks for that."""
        if seed not in self.seen:
            from transformers import AutoImageProcessor

            pixels = AutoImageProcessor.from_pretrained(self.path)(drawn(seed), return_tensors="pt")
            (features,) = self.network.get_image_features(**pixels).pooler_output
            self.seen[seed] = features, pixels.get("image_grid_thw")
        return self.seen[seed]

    def _features(self, picture: Picture) -> torch.Tensor:
        """(tokens, hidden) in the place of its tokens' embeddings."""
        features, _ = self._see(picture.seed)
        if len(features) != picture.tokens:
            raise ValueError(f"picture {picture.seed} is {len(features)} tokens, and not {picture.tokens}")
        return features

    def _turned(self, request: Request, position: torch.Tensor) -> torch.Tensor:
        """(3, tokens): by what RoPE's three parts turn the tokens at these positions (M-RoPE)."""
        if request not in self.placed:
            kinds = torch.zeros(1, len(request.prompt), dtype=torch.int)
            for p in request.pictures:
                kinds[:, p.at : p.at + p.tokens] = 1
            grids = torch.cat([self._see(p.seed)[1] for p in request.pictures])
            found, behind = self.network.model.get_rope_index(torch.tensor([request.prompt]), kinds, grids)
            self.placed[request] = found[:, 0], int(behind)
        prompt, behind = self.placed[request]
        last = prompt.shape[1] - 1
        return torch.where(position <= last, prompt[:, position.clamp_max(last)], position + behind)
