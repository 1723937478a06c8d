"""`python -m proof train`: train the demo model, or continue, and write the checkpoint that the repository keeps.

    python -m proof train                       # all of the plan, into models/demo
    python -m proof train --steps 200 --out DIR

It may be stopped and started again: the state for that is kept in .demo/. The same machine gives the same weights;
another one rounds differently and gives different weights that answer just as well. The weights in the repository are
identified by their SHA-256, in models/demo/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from proof.demo.texts import tokenizer_texts
from proof.demo.tokenizer import train_tokenizer
from proof.demo.train import PLAN, Training, train
from vllm_kvq.bench.models.checkpoint import LlamaShape, save_checkpoint
from vllm_kvq.eval.demo import DEMO

VOCAB = 2048
SHAPE = LlamaShape(
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=768,
    vocab=VOCAB,
    rope_theta=100_000.0,
    tied=True,
)
WORK = Path(".demo")


def tokenizer_in(folder: Path) -> Tokenizer:
    """Created once: it takes ten seconds, and existing training depends on it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(tokenizer_texts(), VOCAB).save(str(path))
    return Tokenizer.from_file(str(path))


def write(training: Training, tokenizer: Tokenizer, out: Path) -> str:
    """The checkpoint in bfloat16; the SHA-256 of its weights."""
    # At vLLM's default temperature of 1 even a model that knows its text makes a mistake every hundred tokens.
    sampling = {"temperature": 0.0}
    save_checkpoint(out, training.shape, training.weights, tokenizer, torch.bfloat16, sampling)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof train", description="Train the demo model, or continue its training."
    )
    parser.add_argument(
        "--steps", type=int, default=PLAN.steps, help="steps after which to stop (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=DEMO, help="folder for the checkpoint (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    tokenizer = tokenizer_in(WORK / "training")
    training = Training(replace(SHAPE, vocab=tokenizer.get_vocab_size()), tokenizer, PLAN)
    train(training, WORK / "training" / "state.pt", args.steps)
    print(f"{args.out}: step {training.step}, weights {write(training, tokenizer, args.out)}")
    return 0
