"""Structured output of requests: answers of nothing but some letters, as a grammar for vLLM and as a mask of tokens for
the judge, which knows no grammar."""

from __future__ import annotations

from typing import Any

import torch

from proof.oracle.trace import Request


def sampled(request: Request) -> dict[str, Any]:
    """The part of vLLM's sampling parameters that holds the answer to the request's letters. The answer never ends, as
    with `ignore_eos` for other requests."""
    if not request.letters:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(grammar=f"root ::= [{request.letters}] root")}


class Vocabulary:
    """The tokens of a checkpoint's tokenizer."""

    def __init__(self, checkpoint: str, size: int) -> None:
        """`size`: of the model's logits, of which the tokenizer may know fewer or more."""
        self.checkpoint, self.size = checkpoint, size
        self.known: dict[str, torch.Tensor] = {}

    def allowed(self, request: Request) -> torch.Tensor:
        """(size,) the tokens that the answer may have. A grammar that never ends rules out its stop tokens."""
        allowed = self.made_of(request.letters).clone()
        allowed[list(request.stop_token_ids)] = False
        return allowed

    def made_of(self, letters: str) -> torch.Tensor:
        """(size,) whether a token's text has only these letters."""
        if letters not in self.known:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
            mine, single = set(letters), {f"<0x{ord(letter):02X}>" for letter in letters}
            allowed = torch.zeros(self.size, dtype=torch.bool)
            for text, token in tokenizer.get_vocab().items():
                if token < self.size:
                    allowed[token] = bool(text) and (set(text) <= mine or text in single)
            self.known[letters] = allowed
        return self.known[letters]
