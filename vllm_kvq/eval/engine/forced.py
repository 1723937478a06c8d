"""A logits processor for vLLM that makes a request begin its answer with given tokens.

The probabilities that the engine reports are those before the processor (`logprobs_mode` "raw_logprobs", vLLM's
default). This is how the plain cache scores, decode step by decode step, the tokens that a format has generated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

ARGUMENT = "kvq_forced_tokens"
"""The key in `SamplingParams.extra_args`."""


OfRequest = Callable[[list[int], torch.Tensor], torch.Tensor]
"""(tokens generated so far, logits) -> logits."""


class Forced(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> OfRequest | None:
        tokens = (params.extra_args or {}).get(ARGUMENT)
        return None if tokens is None else _Tokens(tokens)


class _Tokens:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) < len(self.tokens):
            logits.fill_(-torch.inf)
            logits[self.tokens[len(generated)]] = 0.0
        return logits
