"""`vllm-kvq check`: whether `vllm serve` with these arguments would start here, and what it would serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vllm_kvq import console
from vllm_kvq.cli.check.words import wrong_models, wrong_words
from vllm_kvq.cli.logs import be_quiet, let_kernels_log
from vllm_kvq.formats.budgets import RECOMMENDED
from vllm_kvq.integration.preview.dry_start import NoFormat, WouldNotStart, WrongUsage, dry_start


def parser() -> console.Parser:
    """Only for help and wrong usage; the arguments themselves are read by vLLM's own parser."""
    p = console.parser(
        "vllm-kvq check",
        "Would `vllm serve` with the same arguments start here? Takes every flag of vllm serve; loads no weights.",
        (
            "MODEL",
            f"MODEL --kv-cache-dtype {RECOMMENDED}",
            "MODEL --kv-cache-dtype kitty2 --max-model-len 8192 --json",
            'MODEL --kv-cache-dtype kitty2 \\\n      --additional-config \'{"kvq": {"W": 64}}\'',
        ),
        "it would not start; the sentence says why",
    )
    p.usage = "vllm-kvq check MODEL [--kv-cache-dtype FORMAT] [any flag of vllm serve]"
    p.add_argument("model", metavar="MODEL", help="model name, or checkpoint folder")
    p.add_argument(
        "--kv-cache-dtype",
        metavar="FORMAT",
        help="one of `vllm-kvq formats`, or a budget such as kvq3 (default: all formats, in half a minute)",
    )
    text = """options, as in {"kvq": {"W": 64}} (default: the format's own)"""
    p.add_argument("--additional-config", metavar="JSON", help=text)
    p.add_argument(
        "--max-model-len",
        metavar="TOKENS",
        help="maximum request length; like all other flags, as for vllm serve (default: the model's)",
    )
    p.add_argument("--verbose", action="store_true", help="show vLLM's log on standard error")
    console.add_json(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & {*given}:
        parser().print_help()
        return console.DONE
    as_json, verbose = "--json" in given, "--verbose" in given
    let_kernels_log()
    words = [word for word in given if word not in ("--json", "--verbose")]
    p = parser()
    p.as_json = as_json
    if problem := wrong_words(words) or wrong_models(words):
        p.error(problem)
    if not verbose:
        be_quiet()
    try:
        start = dry_start(words)
        from vllm_kvq.integration.preview.description import describe  # imports vllm

        found = describe(start)
    except NoFormat:
        from vllm_kvq.cli.check import every

        return every.main(words, as_json)
    except WrongUsage as error:
        p.error(str(error))
    except WouldNotStart as error:
        found = {"starts": False, "sentence": str(error)}
    if as_json:
        console.show_json(found)
    else:
        show(found)
    return console.DONE if found["starts"] else console.FOUND


def show(found: dict[str, Any]) -> None:
    print(verdict(found))
    if "format" in found:
        print()
        console.Table(("", ""), rows(found), 2).show()


def verdict(found: dict[str, Any]) -> str:
    if not found["starts"]:
        return f"no: {found['sentence']}"
    return "yes, it would start here" + (f", but {found['fewer_tokens']}" if found["fewer_tokens"] else "")


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    from vllm_kvq.integration.plan.memory import gib

    layers, kernels, memory, capacity = (found[name] for name in ("layers", "kernels", "memory", "capacity"))
    path = kernels["path"] + (f" ({kernels['isa']})" if kernels["isa"] else "")
    per_request = f"in requests of {capacity['request_tokens']}"
    blocks = found["request_blocks"]
    shares = [f"{n} for {what.replace('_', ' ')}" for what, n in blocks.items() if n]
    text = [
        ("packed", f"{layers['packed']} of {layers['all']} layers, as {found['label']}"),
        ("not packed", ", ".join(layers["not_packed"]) or "none"),
        (
            "bits per element",
            f"{found['bits_per_element']:.3f} with all parameters, in pages of N={found['N']} tokens",
        ),
        ("full precision", f"newest {found['W']} tokens (W), first {found['S']} (S)"),
        ("a request takes", f"{sum(blocks.values())} blocks of the pool: {', '.join(shares)}"),
        ("kernels", path),
        ("memory, about", f"{gib(memory['bytes'])}: {memory['because']}"),
        ("capacity, about", f"{capacity['tokens']:,} tokens {per_request}; bf16: {capacity['bf16_tokens']:,}"),
    ]
    text[1:1] = [("by layer", line) for line in found["by_layer"]]
    if found["budget"]:
        text.insert(0, ("budget", found["budget"]))
    text += [("warning", sentence) for sentence in found["warnings"]]
    return text + [("slow", sentence) for sentence in (kernels["why_not_faster"], kernels["slow"]) if sentence]
