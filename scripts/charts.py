"""What other projects' charts say about examples/kubernetes, for tests/shipping/test_kubernetes.py, which has no charts
and no Helm.

    pip install helm-python-sdk==0.2.2 pyyaml      # Helm's own library, 250 MB, in an environment of its own
    python scripts/charts.py FOLDER                # writes tests/shipping/charts

FOLDER has clones of vllm-project/production-stack, llm-d-incubation/llm-d-modelservice and ray-project/kuberay. A file
of tests/shipping/charts has the schema of a chart's values, or of KubeRay's RayService, cut down to what our file sets,
and closed: charts pass over a field that they do not know, and a mistyped one must be noticed. For a chart it also has
what Helm makes of our values, so that tests see the very pods that a cluster would get.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, CHARTS = ROOT / "examples" / "kubernetes", ROOT / "tests" / "shipping" / "charts"
KEPT = {"type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "additionalProperties"}
"""Keywords that are kept as they are. Descriptions and defaults check nothing."""
WIDTH = 120
Place = tuple[str | int, ...]
"""The path to a field: names, and numbers in lists."""


@dataclass(frozen=True)
class Chart:
    name: str
    """The name of the file in examples/kubernetes."""
    repository: str
    schema: str
    """Where the schema is in the repository; a chart's is in the folder of its Chart.yaml."""
    renders: bool = True


ALL = (
    Chart("production-stack", "vllm-project/production-stack", "helm/values.schema.json"),
    Chart("llm-d", "llm-d-incubation/llm-d-modelservice", "charts/llm-d-modelservice/values.schema.json"),
    Chart(
        "rayservice", "ray-project/kuberay", "helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml", renders=False
    ),
)


def fingerprint(text: str) -> str:
    """A hash of a file of examples/kubernetes without its comments."""
    return hashlib.sha256(repr(yaml.safe_load(text)).encode()).hexdigest()


def reduced(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """What `schema` says of the fields that `values` set. Any other field is a mistake."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {name: value for name, value in schema.items() if name in KEPT}
    made |= {
        name: [reduced(inner, values) for inner in schema[name]]
        for name in ("anyOf", "oneOf", "allOf")
        if name in schema
    }
    objects = [value for value in values if isinstance(value, dict)]
    if elements := [inner for value in values if isinstance(value, list) for inner in value]:
        made["items"] = reduced(schema.get("items", {}), elements)
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = reduced(made["additionalProperties"], [])
    elif objects:
        known, names = schema.get("properties", {}), sorted({name for value in objects for name in value})
        made["properties"] = {
            name: reduced(known.get(name, {}), [value[name] for value in objects if name in value]) for name in names
        }
        made["additionalProperties"] = False
    return made


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """The path to every field, also to those that hold others."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        if isinstance(name, str):
            yield (*at, name)
        yield from places(inner, (*at, name))


def is_known(schema: dict[str, Any], place: Place) -> bool:
    """Whether the schema has this field by its name, or any name."""
    for name in place:
        if isinstance(name, int):
            schema = schema.get("items", {})
        elif name in schema.get("properties", {}):
            schema = schema["properties"][name]
        elif isinstance(schema.get("additionalProperties"), dict):
            schema = schema["additionalProperties"]
        else:
            return False
    return True


def changed(values: dict[str, Any], place: Place) -> dict[str, Any]:
    """With another value there, or without it."""
    other = copy.deepcopy(values)
    inside: Any = other
    for name in place[:-1]:
        inside = inside[name]
    match inside[place[-1]]:
        case bool(value):
            inside[place[-1]] = not value
        case int(value):
            inside[place[-1]] = value + 1
        case str(value):
            inside[place[-1]] = f"{value}-2"
        case _:
            del inside[place[-1]]
    return other


def schema_of(path: Path) -> dict[str, Any]:
    schema = yaml.safe_load(path.read_text(encoding="utf-8"))
    if schema.get("kind") == "CustomResourceDefinition":
        (version,) = [v for v in schema["spec"]["versions"] if v["name"] == "v1"]
        schema = version["schema"]["openAPIV3Schema"]
        # Kubernetes's own, in every object
        schema["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    return schema


class Helm:
    """The chart in this folder."""

    def __init__(self, folder: Path) -> None:
        import helm_python

        self.wrong = helm_python.HelmError
        self.chart = helm_python.Chart.load(str(folder))

    def documents(self, values: dict[str, Any]) -> list[Any]:
        """What `helm install kvq` would hand to a cluster."""
        self.chart.validate_schema(values)
        made = self.chart.render(values, name="kvq", namespace="default")
        texts = [text for name, text in sorted(made.items()) if name.endswith(".yaml")]
        return [document for text in texts for document in yaml.safe_load_all(text) if document]

    def uses(self, values: dict[str, Any], place: Place) -> bool:
        """Whether this field changes anything."""
        try:
            return self.documents(changed(values, place)) != self.documents(values)
        except self.wrong:
            return True


def described(chart: Chart, clones: Path) -> dict[str, Any]:
    """A file of tests/shipping/charts."""
    clone, text = clones / chart.repository.rpartition("/")[2], (EXAMPLES / f"{chart.name}.yaml").read_text("utf-8")
    values = yaml.safe_load(text)
    commit = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    made: dict[str, Any] = {"repository": chart.repository, "commit": commit.stdout.strip(), "file": chart.schema}
    made["licence"] = "Apache-2.0"
    schema = schema_of(clone / chart.schema)
    made["schema"] = reduced(schema, [values])
    unknown = [place for place in places(values) if not is_known(schema, place)]
    if chart.renders:
        helm = Helm((clone / chart.schema).parent)
        made |= {"chart": f"{helm.chart.name} {helm.chart.version}", "rendered_of": fingerprint(text)}
        made["rendered"] = helm.documents(values)
        unknown = [place for place in unknown if not helm.uses(values, place)]
    if unknown:
        names = ", ".join(".".join(map(str, place)) for place in unknown)
        sys.exit(f"examples/kubernetes/{chart.name}.yaml: {chart.repository} does not know {names}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, metavar="FOLDER", help="with clones of the charts' repositories")
    clones = p.parse_args(arguments).folder
    CHARTS.mkdir(exist_ok=True)
    for chart in ALL:
        head = f"# {chart.repository} under its licence, changed and cut down by scripts/charts.py, which says how.\n"
        made = yaml.safe_dump(described(chart, clones), sort_keys=False, width=WIDTH)
        (CHARTS / f"{chart.name}.yaml").write_text(head + made, encoding="utf-8")
        print(f"tests/shipping/charts/{chart.name}.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
