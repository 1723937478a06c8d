"""docs/formats.md says what the code does: its tables are compared with their sources."""

import re
from pathlib import Path

import pytest
import torch

from vllm_kvq.cli.eval import error as error_table
from vllm_kvq.eval.peers import PEERS
from vllm_kvq.formats import FORMATS, Geometry
from vllm_kvq.formats.budgets import BUDGETS
from vllm_kvq.formats.codec import HEAD_SIZES
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.formats.table import declared_options, key_codecs, value_codecs
from vllm_kvq.kernels.slots import SlotGeometry

DOCS = Path(__file__).parents[2] / "docs"
DOC, ARCHITECTURE = ((DOCS / page).read_text(encoding="utf-8") for page in ("formats.md", "architecture.md"))


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = re.split(r"^## ", DOC, flags=re.M)
    body = next(s for s in section if s.startswith(heading + "\n"))
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[c.strip().strip("`") for c in line.strip("|").split("|")] for line in lines[2:]]


def test_options_table() -> None:
    want = [[o.name, o.help, ", ".join(codecs) or "all", o.allowed] for o, codecs in declared_options()]
    printed = "\n".join(f"| `{n}` | {h} | {c} | {a} |" for n, h, c, a in want)
    assert rows("Options") == want, f"the table should be\n{printed}"


def test_codecs_table() -> None:
    halves = (("keys", key_codecs()), ("values", value_codecs()))
    want = [[half, codec.name, codec.title] for half, codecs in halves for codec in codecs.values()]
    printed = "\n".join(f"| {h} | `{n}` | {t} |" for h, n, t in want)
    assert rows("Codecs") == want, f"the table should be\n{printed}"


def test_bits_table() -> None:
    public = {n: f for n, f in FORMATS.items() if f.public}
    want = [
        [name, *(f"{f.bits_per_element(d, n):.3f}" for d in (64, 128) for n in (64, 128))]
        + [f"{f.capacity_factor(d, 64):.2f}" for d in (64, 128)]
        for name, f in public.items()
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("What a format costs") == want, f"the table should be\n{printed}"


def test_budgets_table() -> None:
    want = [
        [budget.name, f"{budget.most:g}", ", ".join(f"`{name}`" for name in budget.formats)]
        for budget in BUDGETS.values()
    ]
    assert rows("Budgets") == [[name, most, formats.strip("`")] for name, most, formats in want]


def test_sinks_table() -> None:
    want, slots = [], {}
    for n in (64, 128):
        fmt = FORMATS["kitty2"].bind(Geometry(128, n, torch.bfloat16))
        slots[n] = SlotGeometry.of(fmt, 8, 0)
        sidecar, sinks = slots[n].sidecar_blocks, slots[n].sink_blocks
        for tokens in (1024, 4096, 32768):
            pages = tokens // n
            share = f"{100 * sinks / (pages + sidecar):.1f} %"
            want.append([str(n), f"{tokens:,}", str(pages), str(sidecar), str(sinks), share])
    printed = "\n".join(f"| {' | '.join(row)} |" for row in want)
    assert rows("What sinks cost") == want, f"the table should be\n{printed}"
    room = f"here {slots[64].slots_per_block} at N = 64 and {slots[128].slots_per_block} at N = 128"
    assert room in DOC
    # the same example in docs/architecture.md
    layout, own = fmt.slab_region.nbytes // 8, 4 * slots[128].slot_bytes // 8
    assert f"4 of the {slots[128].slots_per_block} tokens" in ARCHITECTURE
    assert f"{own} of\n  {fmt.record_bytes:,} bytes" in ARCHITECTURE
    assert 5 < own / layout < 6
    assert 5 < fmt.record_bytes / own < 6
    free = []
    for name in ("kitty2", "squat2"):
        cut = SlotGeometry.of(FORMATS[name].bind(Geometry(128, 128, torch.bfloat16)), 8, 0)
        free.append(cut.sidecar_blocks * cut.slots_per_block - cut.ring_at - cut.ring)
    assert free == [5, 22]


@pytest.mark.parametrize("head", HEAD_SIZES)
def test_four_sinks_take_one_page_of_any_16_bit_model(head: int) -> None:
    """docs/serving.md says so; more would cost the shortest prefix hits."""
    for fmt in (f for f in FORMATS.values() if f.public):
        options = {"S": 4} | ({"outliers": 0} if fmt.name == "qjl3" else {})
        assert SlotGeometry.of(fmt.bind(Geometry(head, 32, torch.bfloat16), options), 1, 0).sink_blocks == 1


def test_windows_and_sinks_of_the_first_table() -> None:
    said = re.findall(r"^\| (`[^|]*`) \|.*\| (\d+), (\d+) \|$", DOC.partition("\n## ")[0], re.M)
    found = {name: (int(w), int(s)) for names, w, s in said for name in re.findall(r"`(\w+)`", names)}
    public = {name: fmt.settings() for name, fmt in FORMATS.items() if fmt.public}
    assert found == {name: (settings.W, settings.S) for name, settings in public.items()}


def test_comparison_table() -> None:
    want = [
        [name, fmt.title, *(f"{fmt.bits_per_element(d, 128):.3f}" for d in (64, 128))]
        for name, fmt in ((name, FORMATS[name]) for name in PEERS)
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("Formats for comparison") == want, f"the table should be\n{printed}"


def test_transform_table() -> None:
    want = []
    for name in (name for name, fmt in FORMATS.items() if fmt.keys is TransformedKeys):
        settings = FORMATS[name].settings()
        bits = [f"{settings.get(option):g}" for option in ("key_rate", "searched_bits")]
        want.append([name, *bits, *(f"{FORMATS[name].bits_per_element(d, 128):.3f}" for d in (64, 128))])
    assert rows("Transform coding") == want


def test_padding_table() -> None:
    want = [
        [name, *(f"{FORMATS[name].bits_per_element(d, 64):.2f}" for d in (80, 96, 112, 128))]
        for name in (n for n, f in FORMATS.items() if f.public and f.keys.name != "kivi")
    ]
    printed = "\n".join("| " + " | ".join([f"`{r[0]}`", *r[1:]]) + " |" for r in want)
    assert rows("Head sizes") == want, f"the table should be\n{printed}"


def test_symmetric_share() -> None:
    said = re.search(r"symmetric mode wins ([\d.]+) % of the\s+key groups", DOC)
    assert said
    assert float(said[1]) == pytest.approx(100 * error_table.symmetric_share(128)[0], abs=0.1)
