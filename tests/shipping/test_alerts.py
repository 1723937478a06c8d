"""docker/alerts.yaml and the dashboard, without a server: their queries parse and ask for metrics that exist.

tests/servers/test_metrics.py asks a server for the same names.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from vllm_kvq.integration.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCKER, METRICS_PAGE, OPERATING = ROOT / "docker", ROOT / "docs" / "metrics.md", ROOT / "docs" / "operating.md"
SAMPLES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""What prometheus_client appends to the name of a metric."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Labels(Strict):
    severity: str = Field(pattern="^(warning|critical)$")


class Annotations(Strict):
    summary: str


class Alert(Strict):
    alert: str = Field(pattern="^KVQ[A-Za-z]+$")
    expr: str
    lasts: str = Field("0m", alias="for", pattern=r"^\d+m$")
    labels: Labels
    annotations: Annotations


class Group(Strict):
    name: str
    rules: list[Alert]


class Rules(Strict):
    """Prometheus's file of rules, as far as we use it."""

    groups: list[Group]


def read_alerts() -> list[Alert]:
    rules = Rules.model_validate(yaml.safe_load((DOCKER / "alerts.yaml").read_text()))
    return [alert for group in rules.groups for alert in group.rules]


def vllms_samples() -> set[str]:
    """Names of the samples that vLLM's metrics have, from the source that declares them."""
    import vllm.v1.metrics.loggers as loggers

    found = set()
    for call in ast.walk(ast.parse(inspect.getsource(loggers))):
        if isinstance(call, ast.Call) and (kind := re.search("gauge|counter|histogram", ast.unparse(call.func))):
            names = [
                ast.literal_eval(k.value)
                for k in call.keywords
                if k.arg == "name" and isinstance(k.value, ast.Constant)
            ]
            found |= {name.removesuffix("_total") + end for name in names for end in SAMPLES[kind.group()]}
    return found


SAMPLES_THERE = vllms_samples() | {f"{metric.name}_total" if metric.counts else metric.name for metric in METRICS}


def names_in(part: Any) -> set[str]:
    """The metrics that a parsed query, or a part of one, asks for."""
    if isinstance(part, promql_parser.VectorSelector):
        return {part.name}
    inner = [getattr(part, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    inner += [*getattr(part, "args", [])]
    return {name for one in inner if one is not None for name in names_in(one)}


def unknown_names(query: str) -> set[str]:
    """Raises if it does not parse. `up` is Prometheus's own."""
    asked = names_in(promql_parser.parse(query))
    assert asked, query
    return asked - SAMPLES_THERE - {"up"}


ALERTS = read_alerts()
PANELS = json.loads((DOCKER / "grafana" / "dashboards" / "vllm-kvq.json").read_text())["panels"]
WRITTEN = [
    query for page in (METRICS_PAGE, OPERATING) for query in re.findall("`([^`]*vllm:[a-z_]+[^`]*)`", page.read_text())
]
QUERIES = (
    [alert.expr for alert in ALERTS] + [target["expr"] for panel in PANELS for target in panel["targets"]] + WRITTEN
)


@pytest.mark.parametrize("query", QUERIES)
def test_queries_ask_for_metrics_that_exist(query: str) -> None:
    assert unknown_names(query) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "vllm:kvq_clamped > 0",
        "vllm:gpu_cache_usage_perc > 0.9",
        "rate(vllm:num_preemptions[5m])",
        'rate(vllm:inter_token_latency_seconds{model_name=~"$model"}[5m])',
        "kvq_clamped_total > 0",
        "sum by (le) (-(vllm:kvq_packed > 0)) or up",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert len(unknown_names(wrong)) == 1


def test_what_is_not_promql_is_found() -> None:
    with pytest.raises(ValueError):
        unknown_names("rate(vllm:num_preemptions_total[5m)")


def test_alerts_are_of_the_job_that_is_scraped() -> None:
    prometheus = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    assert prometheus["rule_files"] == ["alerts.yaml"]
    jobs = {scrape["job_name"] for scrape in prometheus["scrape_configs"]}
    assert {job for alert in ALERTS for job in re.findall('job="(.*?)"', alert.expr)} == jobs


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.alert)
def test_an_alert_says_one_sentence_and_which_server(alert: Alert) -> None:
    text = re.sub(r"\{\{.*?\}\}", "X", alert.annotations.summary)
    assert re.fullmatch(r"[A-Z][^.]*\.", text)
    assert "{{ $labels.instance }}" in alert.annotations.summary


def test_what_may_go_wrong_has_an_alert() -> None:
    """A server that is gone or back, damage, too little room, and prefixes that are not found."""
    asked = {name for alert in ALERTS for name in re.findall(r"vllm:[a-z_]+|\bup\b", alert.expr)}
    assert asked == {
        "up",
        "vllm:prompt_tokens_total",
        "vllm:kvq_clamped_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    }


def test_each_alert_is_in_the_table_and_has_something_to_do() -> None:
    names = [alert.alert for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert re.findall(r"^\| `(KVQ\w+)` \|", METRICS_PAGE.read_text(), re.MULTILINE) == names
    assert re.findall(r"^\| `(KVQ\w+)` \|", OPERATING.read_text(), re.MULTILINE) == names
