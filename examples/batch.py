"""Answers a file of questions with a low-bit KV cache, and resumes where it stopped.

    python examples/batch.py questions.jsonl answers.jsonl --model MODEL --kv-cache-dtype kvq3

    questions.jsonl   an object per line: {"prompt": "..."}, or {"messages": [...]} for the model's chat template. What
                      else it holds, say an id, is copied.
    answers.jsonl     the same objects in the same order, with "answer" and "tokens", written --piece at a time

All options of `vllm serve` that describe an engine are understood. To start over, delete answers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, EngineArgs, SamplingParams
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

Question = dict[str, Any]
OURS = ("answer", "tokens")


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def questions(path: Path) -> list[Question]:
    found = []
    with path.open(encoding="utf-8") as lines:  # not splitlines, which takes some characters in a text for line ends
        for number, line in enumerate(lines, 1):
            try:
                question = json.loads(line)
                if not isinstance(question, dict) or ("prompt" in question) == ("messages" in question):
                    raise ValueError('not an object with either "prompt" or "messages"')
                if taken := question.keys() & {*OURS}:
                    raise ValueError(f"the job writes {min(taken)!r}; give yours another name")
            except ValueError as e:
                sys.exit(f"{path}, line {number}: {e}")
            found.append(question)
    return found


def answered(path: Path, asked: list[Question]) -> int:
    """How many of the questions are answered already. A line that was cut off is removed."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    for number, (line, question) in enumerate(zip(whole, asked, strict=False), 1):
        if {name: x for name, x in json.loads(line).items() if name not in OURS} != question:
            sys.exit(f"{path}, line {number} answers another question than the one asked; delete it to start over")
    os.truncate(path, sum(map(len, whole)))
    return len(whole)


def answer(llm: LLM, piece: list[Question], sampling: SamplingParams) -> list[Question]:
    done: dict[int, Any] = {}
    for kind, ask in (("prompt", llm.generate), ("messages", llm.chat)):
        mine = [i for i, question in enumerate(piece) if kind in question]
        if mine:
            outputs = ask([piece[i][kind] for i in mine], sampling)
            done |= {i: output.outputs[0] for i, output in zip(mine, outputs, strict=True)}
    return [{**q, "answer": done[i].text, "tokens": len(done[i].token_ids)} for i, q in enumerate(piece)]


def main() -> None:
    parser = FlexibleArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--tokens", type=at_least_one, default=256, help="maximum tokens per answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: 0)")
    parser.add_argument("--piece", type=at_least_one, default=256, help="questions asked at a time (default: 256)")
    load_general_plugins()  # the values of --kv-cache-dtype
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args()
    asked = questions(args.questions)
    done = answered(args.answers, asked)
    if done >= len(asked):
        print(f"{args.answers} has all {len(asked)} answers")
        return
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
    with args.answers.open("a", encoding="utf-8") as file:
        for at in range(done, len(asked), args.piece):
            rows = answer(llm, asked[at : at + args.piece], sampling)
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
            print(f"{at + len(rows)} of {len(asked)} answered", flush=True)


if __name__ == "__main__":
    main()
