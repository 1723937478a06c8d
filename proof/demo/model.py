"""The models this project brings along: `demo_model` is trained, `random_model` is for tests.

python -m proof.demo.model OUT_DIR      trains the demo model and writes it there (about a minute)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from vllm_kvq.bench.checkpoint import LlamaShape, save_checkpoint
from vllm_kvq.bench.random_model import random_model
from vllm_kvq.bench.tokenizer import train_tokenizer

from .corpus import SYSTEM_TEXT, Entry, load_corpus
from .train import TrainOptions, chat_text, forward, train

__all__ = ["demo_model", "random_model", "wrong_tokens"]

_VOCAB = 1024
_SHAPE = LlamaShape(hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=384, vocab=_VOCAB)


def demo_model(
    out_dir: str | Path,
    options: TrainOptions | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train the demo model and write it into `out_dir` in bfloat16.

    The same machine and options give the same files. Another CPU rounds differently and may end in a model
    that stumbles over the demo's answer, so the answer is tried, and on a mistake the next seed is taken.
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
    # At vLLM's default temperature of 1 even a model that knows its text slips every hundred tokens.
    save_checkpoint(path, shape, weights, tokenizer, torch.bfloat16, sampling={"temperature": 0.0})
    return path


@torch.no_grad()
def wrong_tokens(shape: LlamaShape, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, entry: Entry) -> int:
    """Tokens of the answer that greedy decoding would get wrong, asked as `make run` asks (0: recited)."""
    prompt = tokenizer.encode(chat_text(entry.questions[0], SYSTEM_TEXT)).ids
    answer = tokenizer.encode(f"{entry.answer}<eos>").ids
    logits = forward(shape, weights, torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
    return int((logits.argmax(-1) != torch.tensor(answer)).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model and write it into OUT_DIR.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    demo_model(parser.parse_args().out_dir, report=lambda line: print(f"demo model: {line}", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
