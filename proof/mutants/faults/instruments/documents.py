"""Faults in what judges documents and examples."""

from __future__ import annotations

from proof.mutants.fault import Fault

COMMANDS = "tests/documents/commands/test_commands.py"
KUBERNETES = "tests/shipping/test_kubernetes.py"

FAULTS: tuple[Fault, ...] = (
    # documents and examples
    Fault(
        "the page of connectors has words of its own",
        "proof/tables/connectors.py::row",
        "REFUSED[name]",
        "trial.found",
        "tests/documents/pages/test_connectors_page.py",
    ),
    Fault(
        "a flag has another name than in the documents",
        "proof/residues/main.py::main",
        '"--stride"',
        '"--step"',
        f"{COMMANDS} -k 'read_by and testing'",
    ),
    Fault(
        "a page shows a command that nothing runs",
        "docs/metrics.md",
        "curl -s http://localhost:8000/metrics | grep kvq_",
        "curl -s http://localhost:8000/metrics | grep kvq_\nvllm-kvq doctor",
        f"{COMMANDS} -k 'every_command and metrics'",
    ),
    Fault(
        "KubeRay gets a field that it does not know",
        "examples/kubernetes/rayservice.yaml",
        "minReplicas",
        "minReplica",
        f"{KUBERNETES} -k fields_are_the_charts",
    ),
    Fault(
        "a chart's values are others than Helm was asked about",
        "examples/kubernetes/llm-d.yaml",
        "32768",
        "65536",
        f"{KUBERNETES} -k helm_makes",
    ),
)
