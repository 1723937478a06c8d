"""Faults in what all formats share: pages, options, the round trip."""

from __future__ import annotations

from proof.mutants.fault import Fault
from proof.mutants.faults.formats._written import fault

LAYOUT = (
    fault(
        "a group's last channel is left out",
        "values::TokenValues.unpack",
        "(g + 1) * self.group",
        "(g + 1) * self.group - 1",
        "accuracy.py -k within_bounds",
    ),
    fault(
        "scales lie token by token",
        "values::TokenValues.pack",
        "(scales, -1).transpose(-2, -1)",
        "(scales, -1).reshape(*x.shape[:-2], self.groups, SLAB)",
        "accuracy.py -k within_bounds",
    ),
    fault(
        "planes of neighbouring channels",
        "planes::_merge",
        "i,",
        "p - i,",
        "planes.py",
    ),
    fault(
        "a page of another making is read",
        "page::PageFormat.packed_slabs",
        "& (head[:, :4].view(torch.int32) == MAGIC)",
        "",
        "page.py",
    ),
    fault(
        "a window is rounded down",
        "page::PageFormat.W",
        "round_up(self.settings.W, self.unit)",
        "self.settings.W // self.unit * self.unit",
        "page.py",
    ),
    fault(
        "head padding is not counted",
        "page::PageFormat.bits_per_element",
        "head_size",
        "d",
        "page.py",
    ),
    fault(
        "records on 64-byte boundaries",
        "page::PageFormat.record_bytes",
        "128",
        "64",
        "page.py",
    ),
    fault(
        "fields touch each other",
        "fields::Region.of",
        "end = round_up(end + f.nbytes, ALIGN)",
        "end = end + f.nbytes",
        "fields.py",
    ),
)
OPTIONS = (
    fault("true is a number", "option::Option.check", "and not isinstance(value, bool)", "", "options.py"),
    fault(
        "a value above the largest is accepted",
        "option::Option.check",
        "<= self.high",
        "",
        "options.py",
    ),
    fault(
        "an option is accepted and ignored",
        "settings::check_names",
        "read:",
        "readers():",
        "options.py",
    ),
    fault("a null is a default", "settings::check_names", "is None", "is ...", "options.py"),
    fault("no sinks by default", "settings", "4,", "0,", "options.py"),
    Fault(
        "peers get our sinks",
        "vllm_kvq/eval/peers/__init__.py",
        '"S": 0,',
        "",
        "tests/formats/peers/test_peer_formats.py",
    ),
    fault(
        "a default of another codec's option",
        "table::Format.settings",
        "if name not in own or own[name] in shared",
        "if True",
        "options.py",
    ),
    fault("the factor upside down", "table::Format.capacity_factor", "16 /", "", "docs.py"),
)
ROUNDTRIP = (
    fault(
        "the first token fills the last group",
        "roundtrip::through_pages",
        ".clamp_max(tokens - 1)",
        " % tokens",
        "robustness.py",
    ),
    fault(
        "heads take each other's state",
        "roundtrip::through_pages",
        "repeat(units, 1, 1)",
        "repeat_interleave(units, dim=0)",
        "accuracy.py",
    ),
    fault(
        "query heads of another KV head",
        "constants::grouped",
        "(1, (heads, -1)).transpose(0, 1)",
        "(1, (-1, heads)).transpose(0, 2).transpose(1, 2)",
        "accuracy.py",
    ),
)
FAULTS: tuple[Fault, ...] = (*LAYOUT, *OPTIONS, *ROUNDTRIP)
