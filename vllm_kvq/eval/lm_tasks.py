"""Tasks of lm-evaluation-harness by name, run by its own vLLM backend with a format's cache.

Prompts are read in small chunks, as in the teacher-forced regime: many tasks request log-probabilities of a prompt's
own tokens, and a prompt that is read at once attends its exact keys and values, whatever the format.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvq.eval.choice import Choice
from vllm_kvq.eval.results.result import DECODING, TEACHER_FORCED, Estimate, Row
from vllm_kvq.integration.preview.logs import last_line

METRIC = "score"
NORMAL = 1.96
"""Standard errors on each side of a 95 % confidence interval."""


class LmEvalFailed(Exception):
    """One sentence on why there are no figures."""


@dataclass(frozen=True)
class LmEval:
    """The settings of lm-evaluation-harness, the same for every format."""

    tasks: tuple[str, ...]
    include: Path | None
    """A folder of additional task files."""
    limit: int | None
    """Questions per task; None: all."""
    engine: Mapping[str, Any]
    """Arguments of vLLM's `LLM`, except those of the cache."""

    def __post_init__(self) -> None:
        if find_spec("lm_eval") is None:
            raise LmEvalFailed("lm-evaluation-harness is not installed: pip install 'vllm-kvq[lm_eval]'")

    def run(self, choice: Choice) -> dict[str, Any]:
        """What the harness writes, read from its JSON."""
        with tempfile.TemporaryDirectory(prefix="kvq-lm-eval-") as name:
            folder = Path(name)
            # JSON is also YAML, the language of its configuration
            (folder / "run.yaml").write_text(json.dumps(self.configuration(choice, folder / "out")), encoding="utf-8")
            with (folder / "log").open("wb") as log:
                command = [sys.executable, "-m", "lm_eval", "run", "--config", str(folder / "run.yaml")]
                status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
            written = sorted((folder / "out").rglob("results_*.json"))
            if status or not written:
                said = last_line(folder / "log") or "it printed nothing"
                raise LmEvalFailed(f"lm-evaluation-harness exited with status {status}: {said}")
            found: dict[str, Any] = json.loads(written[-1].read_text(encoding="utf-8"))
        return found

    def configuration(self, choice: Choice, out: Path) -> dict[str, Any]:
        options = {"additional_config": {"kvq": dict(choice.options)}} if choice.options else {}
        return {
            "model": "vllm",
            "model_args": {**self.engine, "kv_cache_dtype": choice.format, **options},
            "tasks": list(self.tasks),
            "output_path": str(out),
            "batch_size": "auto",
            **({"include_path": str(self.include)} if self.include else {}),
            **({"limit": self.limit} if self.limit else {}),
        }


def rows(found: Mapping[str, Any], model: str, choice: Choice, context: int, bits: float | None) -> Iterator[Row]:
    """A row for each figure of each task; `found` is what lm-evaluation-harness writes."""
    for task, figures in found["results"].items():
        if task not in found["configs"]:
            continue  # a group of tasks, each of which has its own rows
        generated = found["configs"][task]["output_type"].startswith("generate")
        for name, value in figures.items():
            metric, comma, how = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{how}")
            known = isinstance(error, int | float)
            interval = (value - NORMAL * error, value + NORMAL * error) if known else ()
            yield Row(
                model=model,
                format=choice.format,
                options=choice.options,
                task=f"{task}: {metric}" + (f", {how}" if how != "none" else ""),
                regime=DECODING if generated else TEACHER_FORCED,
                context=context,
                sequences=found["n-samples"][task]["effective"],
                bits=bits,
                metrics={METRIC: Estimate(float(value), *interval)},
            )
