"""The text to which calibrated formats are fitted in an evaluation: the same for all, and not measured itself.

It is Python's documentation, from paragraphs that `tasks.text` leaves out and `texts.py` does not use.
"""

from __future__ import annotations

from random import Random
from typing import Any

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.tasks.tasks import filler
from vllm_kvq.formats import get_format
from vllm_kvq.formats.by_layer import options_at

TOKENS = 4096
"""The maximum; fewer if the model has no room for as many."""


def calibrated(choice: Choice) -> bool:
    if not choice.ours:
        return False
    settings = get_format(choice.format).settings(options_at(choice.options, None))
    return settings.keys.calibrated or settings.values.calibrated


def calibration_tokens(tokenizer: Any, longest: int) -> tuple[int, ...]:
    text = filler(Random("calibration"), 8 * TOKENS)
    return tuple(tokenizer(text, verbose=False).input_ids[: min(TOKENS, longest - 1)])
