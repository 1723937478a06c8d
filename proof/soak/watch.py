"""A server seen from outside: the memory of its processes, and its metrics."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SERIES = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def tree_rss(pid: int) -> Counter[str]:
    """Bytes of resident memory of a process and all that descend from it, by name."""
    parents, names, resident = {}, {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text(encoding="utf-8").splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(fields["PPid"])
        names[int(folder.name)] = fields["Name"].strip()
        resident[int(folder.name)] = 1024 * int(fields.get("VmRSS", "0 kB").split()[0])
    tree, new = set[int](), {pid} & set(parents)
    while new:
        tree |= new
        new = {child for child, parent in parents.items() if parent in new}
    found: Counter[str] = Counter()
    for p in tree:
        found[names[p]] += resident[p]
    return found


@dataclass(frozen=True)
class Trend:
    """A straight line through the memory after warm-up, by least squares."""

    begin: float
    end: float
    per_minute: float

    @property
    def growth(self) -> float:
        """Share by which the line rises from its beginning to its end."""
        return self.end / self.begin - 1


def trend(samples: Sequence[tuple[float, int]], warm_up: float) -> Trend:
    """`samples` are (seconds, bytes); those of the first `warm_up` seconds don't count."""
    late = [(t, y) for t, y in samples if t >= warm_up]
    if len(late) < 3:
        raise ValueError(f"{len(late)} samples of memory after warm-up are too few for a trend")
    middle_t, middle_y = (sum(x) / len(late) for x in zip(*late, strict=True))
    slope = sum((t - middle_t) * (y - middle_y) for t, y in late) / sum((t - middle_t) ** 2 for t, _ in late)
    begin, end = (middle_y + slope * (t - middle_t) for t in (late[0][0], late[-1][0]))
    return Trend(begin, end, 60 * slope)


@dataclass(frozen=True)
class Metrics:
    """The metrics of one engine in /metrics."""

    blocks: int
    """Blocks that vLLM can hand out: all but block 0."""
    used_blocks: int
    running: int
    waiting: int
    preemptions: int
    hit_tokens: int
    prompt_tokens: int
    generated_tokens: int

    @classmethod
    def parse(cls, text: str) -> Metrics:
        series = _SERIES.findall(text)
        value = {name: float(number) for name, _, number in series}
        info = next(labels for name, labels, _ in series if name == "cache_config_info")
        found = re.search(r'num_gpu_blocks="(\d+)"', info)
        if found is None:
            raise ValueError("vLLM's metrics do not have the number of blocks")
        blocks = int(found[1]) - 1
        return cls(
            blocks,
            # vLLM divides the exact count by `blocks`
            round(value["kv_cache_usage_perc"] * blocks),
            *(
                int(value[name])
                for name in (
                    "num_requests_running",
                    "num_requests_waiting",
                    "num_preemptions_total",
                    "prefix_cache_hits_total",
                    "prompt_tokens_total",
                    "generation_tokens_total",
                )
            ),
        )


def metrics(url: str) -> Metrics:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return Metrics.parse(answer.read().decode())
