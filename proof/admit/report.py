"""What was found of a release: as lines, and as a page of docs/results."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from proof.admit.blame import blamed
from proof.admit.groups import Outcome, without_paths
from proof.admit.names import NO_PATCH, Names, Need
from proof.admit.release import Release
from vllm_kvq.integration.patches.names import SUPPORTED, nearest
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.kernels.cpu.processor import processor_name


@dataclass
class Report:
    release: Release
    names: Names
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.names.lacking and all(outcome.good for outcome in self.outcomes)

    def title(self) -> str:
        tried = "" if self.release.minor in SUPPORTED else f"; not supported, tried as {nearest(self.release.minor)}"
        return f"vLLM {self.release.version} ({self.release.made_of}){tried}"

    def names_in_short(self) -> list[str]:
        patches = [need for need in self.names.needs if need.what != NO_PATCH]
        whole = sum(not need.lacking for need in patches)
        lines = [f"names: {whole} of {len(patches)} patches have theirs"]
        return [*lines, *(line for need in self.names.needs if need.lacking for line in need_lines(need))]

    def outcome_lines(self, outcome: Outcome) -> Iterator[str]:
        counts = f"{outcome.passed} passed, {len(outcome.failures)} failed, {outcome.skipped} skipped"
        yield f"{outcome.group.name}: {counts}, {outcome.seconds:.0f} s"
        if outcome.crash:
            yield "  pytest did not run all of it:"
            yield from (f"    {without_paths(line)}" for line in outcome.crash.splitlines()[-15:])
        for failure in outcome.failures:
            yield f"  FAILED {failure.test}"
            yield f"    {failure.reason}"
            yield f"    broke by: {'; '.join(self.blamed(failure.text))}"

    def blamed(self, text: str) -> list[str]:
        return blamed(text, [patch for patch in PATCHES if patch.what in self.names.patches])

    def verdict(self) -> list[str]:
        version = self.release.version
        if self.good:
            tests = sum(outcome.passed for outcome in self.outcomes)
            return [f"vLLM {version} is admitted: no name is missing, {tests} tests passed"]
        failed = sum(len(outcome.failures) for outcome in self.outcomes)
        unfinished = [outcome.group.name for outcome in self.outcomes if not outcome.good and not outcome.failures]
        wrong = [f"{self.names.lacking} of the lines above lack names"] if self.names.lacking else []
        wrong += [f"{failed} tests failed"] if failed else []
        wrong += [f"not run: {', '.join(unfinished)}"] if unfinished else []
        return [f"vLLM {version} is not admitted: {'; '.join(wrong)}", *self.by_patch()]

    def by_patch(self) -> Iterator[str]:
        """What broke, the patch with the most failed tests first."""
        lacking = {need.what: len(need.lacking) for need in self.names.needs if need.lacking}
        tests = Counter(what for o in self.outcomes for f in o.failures for what in self.blamed(f.text))
        for what in sorted({*lacking, *tests}, key=lambda what: (-tests[what], what)):
            parts = [f"{lacking[what]} names missing"] if what in lacking else []
            parts += [f"{tests[what]} failed tests"] if what in tests else []
            yield f"  {what}: {', '.join(parts)}"

    def in_short(self) -> list[str]:
        lines = [self.title(), *self.names_in_short()]
        return [*lines, *(line for o in self.outcomes for line in self.outcome_lines(o)), *self.verdict()]

    def page(self, command: str) -> str:
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        return "\n".join(
            [
                f"# vLLM {self.release.version}, tried",
                "",
                "Does this release have what the patches need, and do the tests of each kind pass with it? "
                "([Compatibility](../compatibility.md))",
                "",
                f"{seconds / 60:.0f} minutes on {processor_name()}, {datetime.date.today()}.",
                "",
                f"    {command}",
                "",
                *_block(self.in_short()),
                "",
                "Every patch and its names:",
                "",
                *_block([line for need in self.names.needs for line in need_lines(need)]),
                "",
            ]
        )


OUTPUT, END = "```text", "```"


def need_lines(need: Need) -> list[str]:
    if not need.lacking:
        return [f"  ok       {need.what} ({need.place}): {need.count} names"]
    return [f"  MISSING  {need.what} ({need.place})", *(f"             {' '.join(w.split())}" for w in need.lacking)]


def _block(lines: Sequence[str]) -> list[str]:
    """What a command printed, marked as output: it is not a command itself."""
    return [OUTPUT, *(line.rstrip() for line in lines), END]


def output_of(page: str) -> list[str]:
    """The short output that a page of docs/results holds: its first block of output."""
    lines = page.splitlines()
    begin = lines.index(OUTPUT)
    return lines[begin : lines.index(END, begin) + 1]
