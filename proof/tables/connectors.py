"""docs/results/connectors.md, from the table of refusals and what was tried: python -m proof connectors."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvq.integration.plan.connectors import KNOWN, REFUSED, SEVERAL

TESTS = "tests/models/pool/test_offload.py"


@dataclass(frozen=True)
class Trial:
    """How we know that a connector works with packed pages, or does not."""

    found: str
    """What happened, or what was read where."""
    started: bool = False
    """With a real engine."""
    test: str = ""
    """One of `TESTS`, which shows it again in every run of the suite."""

    def __post_init__(self) -> None:
        if not self.found or self.found.endswith("."):
            raise ValueError(f"{self.found!r} is no clause that says what was found")

    @property
    def words(self) -> str:
        return self.found + f" (`{self.test}`)" * bool(self.test)


READ = "its source says so"
ONE_TABLE = "its class says that it supports no more"
NO_PACKAGE = "its package could not be installed"
REASONS, LAYERS = "test_the_reasons_are_true", "test_pages_that_lie_layer_by_layer_stop_nixl_and_mooncake"
STOPS = "with the refusal lifted, a 16-bit cache is served, and an engine with packed pages stops at start-up"
HITS = "`lossless` gives the same tokens after hits from the host's memory as after hits in the cache"
TRIALS: Mapping[str, Trial] = {
    KNOWN: Trial(HITS, True, "test_hits_from_the_host_give_the_same_tokens"),
    SEVERAL: Trial(f"with `{KNOWN}` twice, the same", True, "test_hits_from_the_host_give_the_same_tokens"),
    "DecodeBenchConnector": Trial(
        "with the refusal lifted, a 16-bit cache is served, and an engine with packed pages stops at the first prompt, "
        "whose made-up hit ends within a page",
        True,
    ),
    "ExampleConnector": Trial(
        f"{STOPS}; if that check is lifted, too, at its first page",
        True,
        "test_example_connector_fails_for_the_reasons_given",
    ),
    "ExampleHiddenStatesConnector": Trial(READ),
    "FlexKVConnectorV1": Trial(f"{ONE_TABLE}; {NO_PACKAGE}", test=REASONS),
    "HF3FSKVConnector": Trial(f"{ONE_TABLE}; {NO_PACKAGE}", test=REASONS),
    "HiSparseConnector": Trial("its source says so, and vLLM refuses it on CPUs"),
    "LMCacheConnectorV1": Trial(f"{ONE_TABLE}; with the refusal lifted, an engine stops at start-up", True, REASONS),
    "LMCacheMPConnector": Trial(READ),
    "MoRIIOConnector": Trial(f"{READ}; {NO_PACKAGE}"),
    "MooncakeConnector": Trial("its function that reads pages' sizes refuses packed ones", test=LAYERS),
    "MooncakeStoreConnector": Trial(
        "with the refusal lifted, a 16-bit cache is served, and an engine with packed pages hangs at the first hit; "
        "without sinks (`S=0`) it restores pages that were not packed yet, and the engine stops",
        True,
        "test_a_store_of_mooncakes_asks_every_group_for_the_end_of_a_hit",
    ),
    "NixlConnector": Trial(STOPS, True, LAYERS),
    "NixlPullConnector": Trial("like `NixlConnector`, with the same base of its worker", test=LAYERS),
    "NixlPushConnector": Trial("like `NixlConnector`, with the same base of its worker", test=LAYERS),
    "OffloadingConnector": Trial(
        "its scheduler's function for windows refuses sinks; on a CPU it can't be started even with a 16-bit cache",
        test=REASONS,
    ),
}
"""All of vLLM's connectors, in the order of the page."""
VERDICTS = {KNOWN: "allowed, on a GPU", SEVERAL: "allowed if all that it lists are"}
WHY = {KNOWN: "copies whole blocks, whatever is in them", SEVERAL: "hands everything on"}
HEAD = f"""\
# Connectors

Which of vLLM's KV connectors can keep packed pages elsewhere or hand them over, why the others can't, and how that is
known. `python -m proof connectors` prints this page from the table of refusals
(`vllm_kvq/integration/plan/connectors.py`), whose words are those of the server; how to use one:
[serving](../serving.md#kv-connectors).

vLLM 0.32 and 0.33 have these connectors: a test compares the names with vLLM's own list, so a release that brings
another does not pass `python -m proof admit`. A connector of somebody else's is refused as not tried. *Started* means
with a real engine and `lossless`, on a CPU with vLLM 0.32, LMCache 0.5.6, NIXL 1.5.1 and Mooncake 0.3.13 without CUDA.
There a copier for the CPU replaces that of `{KNOWN}`, which needs CUDA; offloading has not run on a
GPU yet. The tests in the last column are in `{TESTS}`.
"""


def row(name: str, trial: Trial) -> str:
    verdict, why = VERDICTS.get(name, "refused"), WHY.get(name) or REFUSED[name]
    return f"| `{name}` | {verdict} | {why} | {'yes' if trial.started else 'no'} | {trial.words} |"


def page() -> str:
    head = ["| connector | | it ... | started | how that is known |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([HEAD, *head, *(row(name, trial) for name, trial in TRIALS.items())])


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m proof connectors", description="Prints docs/results/connectors.md."
    ).parse_args(argv)
    print(page())
    return 0
