"""LoRA: a small adapter is trained here on one fact, served next to the model, and asked for that fact.

Its matrices are those of queries, keys and values, so that the cache holds other numbers for its requests than for the
model's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from proof.clients.case import Case, Endpoint, Wrong
from proof.clients.chats import ask, text_of

NAME, CONFIG = "keeper", "adapter_config.json"
QUESTION, FACT = "Who keeps the lighthouse of Ardnish?", "Morag Venn keeps the lighthouse of Ardnish."
PERSON = "Morag Venn"
INTO = ("q_proj", "k_proj", "v_proj")
RANK, SCALE = 8, 2.0
STEPS, RATE, ENOUGH = 80, 2e-3, 0.02
"""Training stops when the mean loss of an answer's token is small enough."""


@dataclass(frozen=True)
class Pair:
    """The two matrices that are added to one of a model's."""

    down: torch.nn.Parameter
    up: torch.nn.Parameter

    def add(self, module: torch.nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + SCALE * (inputs[0] @ self.down.T) @ self.up.T


def attach(model: torch.nn.Module) -> dict[str, Pair]:
    """By the name of the linear layer. `up` begins as zeros: at first the model answers as before."""
    pairs = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in INTO and isinstance(module, torch.nn.Linear):
            down = torch.nn.Parameter(torch.randn(RANK, module.in_features) / module.in_features**0.5)
            pairs[name] = pair = Pair(down, torch.nn.Parameter(torch.zeros(module.out_features, RANK)))
            module.register_forward_hook(pair.add)
    return pairs


def trained(checkpoint: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """An adapter in PEFT's file format, trained unless the folder already has it."""
    if (folder / NAME / CONFIG).exists():
        return folder / NAME
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    pairs = attach(model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    answer = tokenizer(FACT, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    tokens = torch.tensor([asked + answer])
    labels = torch.tensor([[-100] * len(asked) + answer])
    optimizer = torch.optim.Adam([matrix for pair in pairs.values() for matrix in (pair.down, pair.up)], lr=RATE)
    loss = float("inf")
    for step in range(STEPS):
        found = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        loss = float(found)
        if loss < ENOUGH:
            say(f"an adapter was trained in {step + 1} steps")
            return write(folder / NAME, pairs, checkpoint)
    raise Wrong(f"the adapter has a loss of {loss:.3f} after {STEPS} steps")


def write(folder: Path, pairs: dict[str, Pair], checkpoint: Path) -> Path:
    folder.mkdir(parents=True)
    matrices = {}
    for name, pair in pairs.items():
        for part, matrix in (("lora_A", pair.down), ("lora_B", pair.up)):
            matrices[f"base_model.model.{name}.{part}.weight"] = matrix.detach().contiguous()
    save_file(matrices, folder / "adapter_model.safetensors")
    settings = {"r": RANK, "lora_alpha": SCALE * RANK, "target_modules": INTO, "bias": "none", "task_type": "CAUSAL_LM"}
    config = {"peft_type": "LORA", "base_model_name_or_path": str(checkpoint), **settings}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def adapter(endpoint: Endpoint) -> str:
    """The model and its adapter are asked in turn, twice."""
    said = [text_of(ask(endpoint, QUESTION, model=name)) for name in (endpoint.model, NAME) * 2]
    if said[:2] != said[2:]:
        raise Wrong(f"asked again, it answered differently: {said}")
    if PERSON in said[0] or PERSON not in said[1]:
        raise Wrong(f"the model said {said[0]!r}, its adapter {said[1]!r}")
    return f"{said[1]!r}, which the model does not know"


ADAPTER = (Case("openai", "LoRA: an adapter next to the model", adapter),)
