"""The demo model's tokenizer, trained on its texts."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from vllm_kvq.bench.models.checkpoint import BOS_ID, SPECIAL_TOKENS
from vllm_kvq.bench.models.tokenizer import byte_level


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """BPE learned from `texts`, with fewer than `vocab` tokens if the texts contain no more pairs.

    Digits are separate tokens, so that sums can be learned, and plain texts begin with <bos>.
    """
    tokenizer = byte_level(models.BPE())
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
