"""Two byte-level BPE tokenizers: one trained on a corpus, one made up to reach any vocabulary size.

Byte-level means that every text has tokens and every token has text; streaming, `vllm bench` and random prompts
rely on that.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from vllm_kvq.bench.checkpoint import BOS_ID, SPECIAL_TOKENS

_SPACE = "Ġ"  # byte-level BPE's spelling of a leading space


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """BPE learned from `texts`, with fewer than `vocab` tokens if the texts contain no more pairs.

    Digits are separate tokens, so that sums can be learned, and plain texts begin with <bos>.
    """
    tokenizer = _byte_level(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), tokenizer.pre_tokenizer])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, BOS_ID)])
    return tokenizer


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
    tokenizer = _byte_level(models.BPE(vocab=ids, merges=merges))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def _byte_level(model: models.Model) -> Tokenizer:
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
