"""Counts what the clients saw, and says whether the soak passed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proof.soak.client import Answer, problem
from proof.soak.load import Order
from proof.soak.watch import Metrics, Trend

GROWTH_LIMIT = 0.02
SHOWN = 5
TOTAL = "total"


class Tally:
    """Collects the reports of all clients; each calls it from its own thread."""

    def __init__(self, repeats_are_equal: bool) -> None:
        """`repeats_are_equal`: a greedy order must be answered as it was before (`lossless` in float32, plain vLLM)."""
        self.repeats_are_equal = repeats_are_equal
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._known: dict[tuple[Any, ...], dict[int, str]] = {}
        self._lock = threading.Lock()

    def answered(self, order: Order, answer: Answer) -> None:
        with self._lock:
            if answer.left:
                self.counts["disconnects"] += 1
                return
            self.counts["done"] += 1
            self.counts["chats"] += order.chat
            self.counts["streams"] += order.stream
            self.counts["n"] += order.n > 1
            self.counts["stopped"] += "stop" in answer.reasons.values()
            wrong = problem(order, answer) or self._compare(order, answer)
            if wrong:
                self.errors.append(wrong)

    def failed(self, error: Exception) -> None:
        with self._lock:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _compare(self, order: Order, answer: Answer) -> str | None:
        if order.question is None:
            return None
        before = self._known.setdefault(order.question, answer.texts)
        if before is answer.texts:
            return None
        self.counts["repeats"] += 1
        if before == answer.texts:
            return None
        self.counts["changed"] += 1
        return "a greedy prompt was answered differently when it came again" if self.repeats_are_equal else None


@dataclass(frozen=True)
class Report:
    tally: Tally
    memory: Mapping[str, Trend]
    """By the name of the process, and of all together under TOTAL."""
    final: Metrics
    complaints: Sequence[str]
    """Lines of the server's log that report an error."""
    exit_status: int

    def problems(self) -> list[str]:
        """Why this soak failed; empty if it passed."""
        found = []
        if not self.tally.counts["done"]:
            found.append("no request was answered")
        if self.tally.errors:
            found.append(f"{len(self.tally.errors)} errors: {'; '.join(self.tally.errors[:SHOWN])}")
        if self.memory[TOTAL].growth >= GROWTH_LIMIT:
            found.append(f"the memory grew by {self.memory[TOTAL].growth:.1%}; less than {GROWTH_LIMIT:.0%} is flat")
        if self.final.used_blocks:
            found.append(f"{self.final.used_blocks} KV blocks are in use although no request is left")
        if self.final.running or self.final.waiting:
            found.append(f"{self.final.running} requests run and {self.final.waiting} wait after the last client")
        if self.complaints:
            found.append(f"{len(self.complaints)} errors in the server's log, the first: {self.complaints[0]}")
        if self.exit_status:
            found.append(f"the server exited with status {self.exit_status}")
        return found

    def text(self) -> str:
        n, end, memory = self.tally.counts, self.final, self.memory[TOTAL]
        differ = "" if self.tally.repeats_are_equal else " (allowed: a hit reads packed history)"
        lines = [
            f"requests: {n['done']} done, {len(self.tally.errors)} errors, {n['disconnects']} disconnects",
            f"  of those done: {n['streams']} streamed, {n['chats']} chats, {n['n']} with n > 1, "
            f"{n['stopped']} ended by a stop string",
            f"  greedy prompts that came again: {n['repeats']}, answered differently: {n['changed']}{differ}",
            f"tokens: {end.prompt_tokens} of prompts, {end.hit_tokens} from the prefix cache, "
            f"{end.generated_tokens} generated, {end.preemptions} preemptions",
            f"memory: {memory.begin / 2**20:.1f} MiB after warm-up, {memory.end / 2**20:.1f} MiB at the end "
            f"({memory.growth:+.2%}, {memory.per_minute / 2**20:+.2f} MiB a minute; flat: below {GROWTH_LIMIT:.0%})",
            "  a minute: "
            + ", ".join(f"{k} {t.per_minute / 2**20:+.2f} MiB" for k, t in self.memory.items() if k != TOTAL),
            f"blocks: {end.blocks - end.used_blocks} of {end.blocks} free at the end, "
            f"{end.running} requests running, {end.waiting} waiting",
            f"server: {len(self.complaints)} errors in its log, exit status {self.exit_status}",
        ]
        return "\n".join([*lines, *(f"FAILED: {p}" for p in self.problems())])
