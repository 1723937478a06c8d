"""`vllm-kvq check MODEL` without a format: what each of them would gain and lose here, the recommended one first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_kvq import console
from vllm_kvq.formats.budgets import BUDGETS, RECOMMENDED
from vllm_kvq.formats.table import public_formats
from vllm_kvq.integration.preview.description import describe
from vllm_kvq.integration.preview.dry_start import WouldNotStart, dry_start

HEAD = ("format", "bits", "tokens", "x bf16", "KL", "speed", "kernels")


def main(arguments: Sequence[str], as_json: bool) -> int:
    found = survey(arguments)
    recommended = budgets(found).get(RECOMMENDED)
    found.sort(key=lambda one: one["format"] != recommended)
    if as_json:
        console.show_json({"formats": found, "budgets": budgets(found)})
    else:
        show(found)
    return console.DONE if any(one["starts"] for one in found) else console.FOUND


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


def show(found: Sequence[dict[str, Any]]) -> None:
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
    meant = budgets(found)
    name = RECOMMENDED if RECOMMENDED in meant else first["format"]
    print()
    if meant:
        print(f"budgets      {', '.join(f'{budget} is {fmt}' for budget, fmt in meant.items())}")
    print(f"switch on    vllm serve {first['model']} --kv-cache-dtype {name}")
    print("go back      leave --kv-cache-dtype out")
    print(f"look closer  vllm-kvq check {first['model']} --kv-cache-dtype {name}")
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
        "bits: of packed pages; the tokens that fit are counted with everything that a request holds",
        f"KL: nats per token, on {where}" if where else "KL: nothing like this model is measured",
    ]
    fast = next((one["speed"]["where"] for one in served if one["speed"]), None)
    said.append(
        f"speed: times bf16's, of attention in a decode step, whose other parts stay as they are; on {fast}"
        if fast
        else "speed: not measured on this kind of processor; vllm-kvq bench attention measures it"
    )
    return said + [f"{one['format']}: {sentence}" for one in served for sentence in one["warnings"]]
