"""The demo model: a small Llama that knows the corpus by heart, trained in about a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from proof.demo.corpus import SYSTEM_TEXT, Entry, load_corpus
from proof.demo.train import TrainOptions, chat_text, forward, train
from vllm_kvq.bench.checkpoint import LlamaShape, save_checkpoint
from vllm_kvq.bench.tokenizer import train_tokenizer

_VOCAB = 1024
_SHAPE = LlamaShape(hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=384, vocab=_VOCAB)


def demo_model(
    out_dir: str | Path,
    options: TrainOptions | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train the demo model and write it into `out_dir` in bfloat16.

    The same machine and options give the same files. Another CPU rounds differently, and the model that it trains may
    make a mistake in the demo's answer. So the answer is checked, and after a mistake the next seed is trained.
    """
    options = options or TrainOptions()
    corpus = load_corpus()
    texts = [text for entry in corpus for text in (*entry.questions, entry.answer)]
    tokenizer = train_tokenizer([*texts, SYSTEM_TEXT], _VOCAB)
    shape = replace(_SHAPE, vocab=tokenizer.get_vocab_size())
    for seed in range(options.seed, options.seed + 3):
        weights = train(shape, tokenizer, corpus, replace(options, seed=seed), report)
        weights = {name: w.to(torch.bfloat16).float() for name, w in weights.items()}
        if not wrong_tokens(shape, weights, tokenizer, corpus[0]):
            break
        report(f"seed {seed} does not know the demo's answer, trying the next")
    else:
        raise RuntimeError("the demo model did not learn its first answer with any of three seeds")
    path = Path(out_dir)
    # At vLLM's default temperature of 1 even a model that knows its text makes a mistake every hundred tokens.
    save_checkpoint(path, shape, weights, tokenizer, torch.bfloat16, sampling={"temperature": 0.0})
    return path


@torch.no_grad()
def wrong_tokens(shape: LlamaShape, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, entry: Entry) -> int:
    """Tokens of the answer that greedy decoding would get wrong, asked as `make run` asks (0: recited)."""
    prompt = tokenizer.encode(chat_text(entry.questions[0], SYSTEM_TEXT)).ids
    answer = tokenizer.encode(f"{entry.answer}<eos>").ids
    logits = forward(shape, weights, torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
    return int((logits.argmax(-1) != torch.tensor(answer)).sum())
