"""`vllm-kvq check MODEL` without a format: what each of them would gain and lose here, the recommended one first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvq import console
from vllm_kvq.cli.check.words import all_words, values
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import public_formats
from vllm_kvq.integration.plan.memory import SPACE, Machine
from vllm_kvq.integration.preview.description import describe
from vllm_kvq.integration.preview.dry_start import WouldNotStart, dry_start

MEMORY = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
"""Flags of vllm serve that say how much memory the cache gets."""
HEAD = ("format", "bits", "tokens", "x bf16", "KL", "speed", "kernels")


def main(arguments: Sequence[str], as_json: bool) -> int:
    memory = memory_wanted(arguments)
    if memory is not None:
        arguments = [*arguments, *memory.flag]
    found = survey(arguments)
    recommended = budgets(found).get(RECOMMENDED)
    found.sort(key=lambda one: one["format"] != recommended)
    if as_json:
        needed = {} if memory is None else {"needed": {"flag": list(memory.flag), "sentence": memory.sentence}}
        console.show_json({"formats": found, "budgets": budgets(found)} | needed)
    else:
        if memory is not None:
            print(f"{memory.sentence}; this counts with {' '.join(memory.flag)}, which serving needs, too")
        show(found, arguments)
    return console.DONE if any(one["starts"] for one in found) else console.FOUND


@dataclass(frozen=True)
class Limit:
    """What a server needs where vLLM's default takes more memory than is free."""

    sentence: str
    flag: tuple[str, str]


def memory_wanted(arguments: Sequence[str]) -> Limit | None:
    """None if the user has said how much the cache may take, or if there is room for vLLM's default."""
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform

    words = all_words(arguments)
    given = os.environ.get(SPACE) or any(values(words, flag) for flag in MEMORY)
    if given or not current_platform.is_cpu():
        return None
    machine = Machine.here()
    problem = machine.problem(None, CacheConfig().gpu_memory_utilization)
    return None if problem is None else Limit(problem.what, machine.limit)


def ranked() -> list[str]:
    """The usual formats in their order, and then the others."""
    listed = public_formats()
    last = len(listed)
    return [fmt.name for fmt in sorted(listed, key=lambda fmt: last if fmt.usual is None else fmt.usual)]


def survey(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What `check` says of each format; one that is refused has only its name and the sentence."""
    from vllm_kvq.integration.advice import losses, speeds

    found: list[dict[str, Any]] = []
    for name in ranked():
        try:
            start = dry_start([*arguments, "--kv-cache-dtype", name])
        except WouldNotStart as error:
            found.append({"format": name, "starts": False, "sentence": str(error)})
        else:
            like, said = losses.nearest(start.served, start.vllm_config), describe(start)
            said["loss"] = {"kl": like.kl[name], "where": like.where} if name in like.kl else None
            fast = speeds.nearest(said["kernels"]["isa"], start.served.max_len)
            times = None if fast is None or slow(said) else fast.times_bf16.get(name)
            said["speed"] = {"times_bf16": times, "where": fast.where} if fast and times else None
            found.append(said)
    return found


def budgets(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The format that each budget means here, as a server chooses it; without those that mean none."""
    fast = {one["format"] for one in found if "capacity" in one and not slow(one)}
    firsts = {budget.name: next((name for name in budget.formats if name in fast), None) for budget in BUDGETS.values()}
    return {budget: name for budget, name in firsts.items() if name is not None}


def slow(one: dict[str, Any]) -> bool:
    return bool(one["kernels"]["slow"] or one["kernels"]["why_not_faster"])


def show(found: Sequence[dict[str, Any]], arguments: Sequence[str]) -> None:
    """`arguments`: those of `vllm serve`, which the next steps repeat."""
    served = [one for one in found if "capacity" in one]
    problems = {one["sentence"] for one in found}
    if len(problems) == 1 and None not in problems:
        print(f"no: {problems.pop()}")
    else:
        for one in found:
            if not one["starts"]:
                print(f"{one['format']}: {one['sentence']}")
    if not served:
        return
    first, capacity = served[0], served[0]["capacity"]
    print(
        f"\nrequests of {capacity['request_tokens']:,} tokens; bf16 holds {capacity['bf16_tokens']:,} tokens of them\n"
    )
    console.Table(HEAD, [row(one) for one in served]).show()
    print()
    for sentence in notes(served):
        print(sentence)
    if all(one["fewer_tokens"] for one in served):
        length = f"{capacity['request_tokens']:,}"
        print(f"\nno format helps: bf16 holds more requests of {length} tokens; leave --kv-cache-dtype out")
        return
    meant = budgets(found)
    name = RECOMMENDED if RECOMMENDED in meant else first["format"]
    print()
    if meant:
        print(f"budgets      {', '.join(f'{budget} is {fmt}' for budget, fmt in meant.items())}")
    print(f"switch on    vllm serve {shlex.join(arguments)} --kv-cache-dtype {name}")
    print("go back      leave --kv-cache-dtype out")
    print(f"details      vllm-kvq check {shlex.join(arguments)} --kv-cache-dtype {name}")
    print(f"measure      vllm-kvq eval {first['model']} --quick")


def row(one: dict[str, Any]) -> tuple[str, ...]:
    capacity = one["capacity"]
    return (
        one["label"],
        f"{one['bits_per_element']:.2f}",
        f"{capacity['tokens']:,}",
        f"{capacity['tokens'] / capacity['bf16_tokens']:.1f}" if capacity["bf16_tokens"] else "-",
        "-" if one["loss"] is None else console.short(one["loss"]["kl"]),
        f"{one['speed']['times_bf16']:.1f}" if one["speed"] else "-",
        one["kernels"]["path"] + (", slow" if slow(one) else ""),
    )


def notes(served: Sequence[dict[str, Any]]) -> list[str]:
    """Where the losses and the speeds come from, and the warnings of each format."""
    where = next((one["loss"]["where"] for one in served if one["loss"]), None)
    said = [
        "bits: of packed pages; the token count includes everything a request stores",
        f"KL: nats per token, on {where}" if where else "KL: not measured on a model like this",
    ]
    fast = next((one["speed"]["where"] for one in served if one["speed"]), None)
    said.append(
        f"speed: decode attention only, relative to bf16; on {fast}"
        if fast
        else "speed: not measured on this kind of processor; vllm-kvq bench attention measures it"
    )
    warned = [f"{one['format']}: {sentence}" for one in served for sentence in one["warnings"]]
    fewer = [f"{one['format']}: {one['fewer_tokens']}" for one in served if one["fewer_tokens"]]
    return said + warned + (fewer if len(fewer) < len(served) else [])
