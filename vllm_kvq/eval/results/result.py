"""One row of an evaluation: the effect of a format on a model's answers in one task, in one regime, at one length.

Each figure has its 95 % confidence interval over sequences. Rows are plain data: `Results.save` writes them as
JSON, `Results.load` reads them back, and a table, a plot or another evaluation needs nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvq.formats.table import label

VERSION = 2
"""The version of the file. Rows written by another version are not read."""

TEACHER_FORCED = "teacher-forced"
"""The whole text is a prompt in small chunks: what each token sees of earlier ones is read from the cache."""
DECODING = "decoding"
"""The prompt is read at once, its last tokens one by one; then the format generates the answer itself, so that its
errors accumulate."""
HITS = "hits"
"""Like decoding, with a prompt in the prefix cache: what a hit covers is read from pages (option `recompute`)."""
READING = "reading"
"""The text is computed at once with the exact cache; what each of its last tokens sees of earlier ones is read as in a
decode step. It runs in transformers, a minute where vLLM takes an hour, and is checked against `DECODING` with the
text's own tokens."""
USUAL = (TEACHER_FORCED, DECODING)
REGIMES = (*USUAL, HITS, READING)

ALL = "all"
"""Instead of a task's name, for the sequences of all tasks."""

BETTER, WORSE = "better", "worse"

METRICS: Mapping[str, str] = {
    "kl": "mean KL divergence from the 16-bit cache's next-token distribution, nats per token",
    "kl_forced": "the same along the continuation that the 16-bit cache generated, which the format is made to say",
    "kl_median": "median of the same over all tokens",
    "kl_p90": "90th percentile of the same; a percentile is given if 100 tokens or more lie beyond it",
    "kl_p99": "99th percentile of the same",
    "kl_p999": "99.9th percentile of the same",
    "top1": "share of tokens where both caches have the same most probable next token",
    "perplexity": "of the text, with the format",
    "perplexity_bf16": "of the text, with the 16-bit cache",
    "dp_mean": "mean change of the text's own token's probability",
    "dp_rms": "root mean square of the same",
    "accuracy": "share of answers of which every token is the most probable one",
    "exact": "share of answers that were generated letter for letter",
    "score": "the task's own figure, as lm-evaluation-harness counts it",
    "agreement": "tokens until a greedy answer differs from the one with the 16-bit cache",
}
"""The meaning of the names in `Row.metrics`. A row has those that its task and regime allow."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval over sequences; the bounds are nan if there is only one sequence."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Bin:
    """A figure for the tokens or answers between two positions, depths or numbers of steps."""

    begin: float
    end: float
    count: int
    """The number of tokens or answers."""
    estimate: Estimate


@dataclass(frozen=True)
class Hurt:
    """A token that the format hurt, in its context."""

    before: str
    token: str
    after: str
    position: int
    kl: float
    probability: float
    """The probability of the text's own token with the format."""
    probability_bf16: float


@dataclass(frozen=True)
class TextFigures:
    """The figures of one text, which are compared between formats, text by text."""

    name: str
    """Its task and number."""
    kind: str
    sources: tuple[str, ...]
    sha: str
    tokens: int
    """The number of tokens compared."""
    kl: float
    """The mean divergence of the tokens."""
    right: tuple[bool, ...] = ()
    """Whether each of its answers is right, in order."""


Curve = tuple[Bin, ...]


@dataclass(frozen=True)
class Row:
    model: str
    format: str
    """A KV cache dtype: `auto` is the 16-bit cache itself."""
    options: Mapping[str, Any]
    """The options that differ from the format's defaults."""
    task: str
    regime: str
    context: int
    """Tokens per sequence, including generated ones."""
    sequences: int
    bits: float | None
    """Bits per element at that length: pages, window, sinks, sidecar and headers. None if the format did not start."""
    page_bits: float | None = None
    """Bits per element of a packed page: what a long context approaches in the layers that are packed."""
    seed: int = 0
    kl_is_bound: bool = False
    """Whether the vocabulary was too large to compare in full: the KL figures are then lower bounds."""
    problem: str | None = None
    """Why there are no figures, in a sentence."""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    by_position: Mapping[str, Curve] = field(default_factory=dict)
    """Metric -> its curve over positions in tokens; `kl`, `kl_forced` and `top1`."""
    by_depth: Mapping[str, Curve] = field(default_factory=dict)
    """Metric -> its curve over how far back the source is, 0 (just before) to 1; `accuracy`, `exact`, `kl`."""
    by_steps: Mapping[str, Curve] = field(default_factory=dict)
    """Metric -> its curve over the steps of work in an answer; `accuracy`, `exact`."""
    hurt: tuple[Hurt, ...] = ()
    """The tokens of the largest divergence, the largest first."""
    texts: tuple[TextFigures, ...] = ()

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"regime {self.regime!r} is none of {', '.join(REGIMES)}")
        for name in (*self.metrics, *self.by_position, *self.by_depth, *self.by_steps):
            if name not in METRICS:
                raise ValueError(f"metric {name!r} is none of {', '.join(METRICS)}")

    @property
    def label(self) -> str:
        """The format as users write it: `squat2:r=8,W=64`."""
        return label(self.format, self.options)

    def document(self) -> dict[str, Any]:
        return _without_nan(asdict(self))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Row:
        """The inverse of `document`."""
        fields = dict(document)
        fields["metrics"] = {name: _estimate(e) for name, e in fields["metrics"].items()}
        for curves in ("by_position", "by_depth", "by_steps"):
            fields[curves] = {name: tuple(map(_bin, curve)) for name, curve in fields[curves].items()}
        fields["hurt"] = tuple(Hurt(**h) for h in fields["hurt"])
        fields["texts"] = tuple(map(_text, fields["texts"]))
        return cls(**fields)


@dataclass(frozen=True)
class Claim:
    """The comparison of a format with another one, the baseline (`eval/results/statistics.py`)."""

    label: str
    baseline: str
    regime: str
    task: str
    context: int
    metric: str
    """`kl`: `value` is the ratio of mean divergences, the geometric mean over texts. `right`: the difference of the
    shares of right answers."""
    texts: int
    value: float
    p: float
    level: float = math.nan
    """The level that p must meet, by Holm's method over all claims of the table."""
    low: float = math.nan
    high: float = math.nan
    """The interval at that level; right answers have none."""

    @property
    def verdict(self) -> str | None:
        """None: no difference beyond chance."""
        if not self.p <= self.level:
            return None
        good = self.value < 1 if self.metric == "kl" else self.value > 0
        return BETTER if good else WORSE

    def document(self) -> dict[str, Any]:
        return _without_nan({**asdict(self), "verdict": self.verdict})

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Claim:
        known: dict[str, Any] = {
            name: math.nan if x is None else x for name, x in document.items() if name != "verdict"
        }
        return cls(**known)


@dataclass(frozen=True)
class Results:
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()

    def document(self) -> dict[str, Any]:
        rows, claims = ([x.document() for x in part] for part in (self.rows, self.claims))
        return {"version": VERSION, "rows": rows, "claims": claims}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.document(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} can't be read as results of `vllm-kvq eval`: {error}") from error
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise ValueError(f"{path} holds no results of `vllm-kvq eval` in version {VERSION}")
        return cls(tuple(map(Row.of, document["rows"])), tuple(map(Claim.of, document["claims"])))


def _without_nan(value: Any) -> Any:
    """JSON has no nan: a bound that does not exist is null."""
    if isinstance(value, dict):
        return {name: _without_nan(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _estimate(document: Mapping[str, Any]) -> Estimate:
    return Estimate(**{name: math.nan if x is None else x for name, x in document.items()})


def _bin(document: Mapping[str, Any]) -> Bin:
    return Bin(**{**document, "estimate": _estimate(document["estimate"])})


def _text(document: Mapping[str, Any]) -> TextFigures:
    lists = {name: tuple(document[name]) for name in ("sources", "right")}
    return TextFigures(**{**document, **lists})
