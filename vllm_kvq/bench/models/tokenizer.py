"""A byte-level BPE tokenizer, made up to reach any vocabulary size.

Byte-level means that every text has tokens and every token has text; streaming, `vllm bench` and random prompts
rely on that.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm_kvq.bench.models.checkpoint import SPECIAL_TOKENS

_SPACE = "Ġ"  # byte-level BPE's spelling of a leading space


def made_up_tokenizer(vocab: int) -> Tokenizer:
    """The 4 special tokens, the 256 bytes, then made-up merges of letters up to `vocab` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    if vocab < len(tokens):
        raise ValueError(f"vocab={vocab} is below {len(tokens)}: the special tokens and the 256 bytes")
    merges = list(itertools.islice(_letter_merges(), vocab - len(tokens)))
    tokens += [left + right for left, right in merges]
    if len(tokens) < vocab:
        raise ValueError(f"vocab={vocab} is above {len(tokens)}, the most this tokenizer can make up")
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = byte_level(models.BPE(vocab=ids, merges=merges))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letter_merges() -> Iterator[tuple[str, str]]:
    """Pairs first (27 * 26), then pair + letter if encoding can reach it.

    Encoding "abc" applies the earlier of the merges ab and bc; only if that is ab can abc be formed from it.
    """
    letters = string.ascii_lowercase
    pairs = [(a, b) for a in _SPACE + letters for b in letters]
    yield from pairs
    for a, b in pairs:
        for c in letters:
            if pairs.index((a, b)) <= pairs.index((b, c)):
                yield a + b, c
