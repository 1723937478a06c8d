"""docs/results/connectors.md says of every connector of vLLM's what the server says, and how that is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proof.tables.connectors import TESTS, TRIALS, Trial, main
from vllm_kvq.integration.plan.connectors import KNOWN, REFUSED, SEVERAL

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "connectors.md"


def test_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    command = "python -m proof connectors > docs/results/connectors.md"
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out, f"run {command}"


def test_every_connector_has_a_row_with_the_servers_words() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (allowed|refused)[^|]* \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert [name for name, verdict, _ in rows if verdict == "allowed"] == [KNOWN, SEVERAL]
    assert {name: why for name, verdict, why in rows if verdict == "refused"} == REFUSED


def test_the_tests_that_are_named_exist() -> None:
    there = re.findall(r"^def (test_\w+)", (ROOT / TESTS).read_text(encoding="utf-8"), re.M)
    named = {trial.test for trial in TRIALS.values() if trial.test}
    assert named
    assert named <= {*there}


@pytest.mark.parametrize("found", ["", "It stops."])
def test_a_trial_says_what_was_found(found: str) -> None:
    with pytest.raises(ValueError, match="is no clause that says what was found"):
        Trial(found)
