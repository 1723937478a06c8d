"""Faults in vllm_kvq/formats."""

from __future__ import annotations

from pathlib import Path

from proof.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[3]
HOME = "vllm_kvq/formats"
TESTS = "tests/formats"
PAPERS = f"{TESTS}/methods/test_papers.py"
BEFORE = "before_rotation.py"


def _fault(name: str, module: str, before: str, after: str, tests: str) -> Fault:
    """`module`: its name, and a function. `tests`: of tests/formats, or of test_papers.py where it is an option."""
    file, *function = module.split("::")
    chosen, space, options = tests.partition(" ")
    where = f"{PAPERS} {tests}" if tests.startswith("-k") else _found(TESTS, f"test_{chosen}") + space + options
    return Fault(name, "::".join((_found(HOME, f"{file}.py"), *function)), before, after, where)


def _found(folder: str, name: str) -> str:
    """The one file of that name below the folder."""
    (found,) = (ROOT / folder).rglob(name)
    return found.relative_to(ROOT).as_posix()


QUANT = (
    _fault("codes round down", "quant::affine_codes", "round", "floor", "-k innerq"),
    _fault("codes may pass the last one", "quant::affine_codes", ".clamp(0, 2**bits - 1)", "", "robustness.py"),
    _fault("a range has one step too many", "quant::affine_parameters", "(2**bits - 1)", "2**bits", "-k squat"),
    _fault("codes fit parameters before float16", "quant::affine_parameters", "half(lo)", "lo", "-k squat"),
    _fault("nan becomes the largest number", "quant::sanitize", "0.0", "LIMIT", "robustness.py"),
    _fault("the scale of equal values is zero", "quant::positive_half", ".clamp_min(TINY)", "", "robustness.py"),
    _fault("a norm is infinite in float16", "quant::half", "clamp(-65504.0, 65504.0).", "", "robustness.py"),
    _fault("only nan is counted as replaced", "quant::sanitize", "(clean != f)", "f.isnan()", "robustness.py"),
)
SQUAT = (
    _fault("lambda the wrong way up", "squat::Corrected._correct", "1 /", "", "-k squat"),
    _fault("the error is added once more", "squat::Corrected._correct", "- z", "+ z", "-k squat"),
    _fault("the newest error on the original keys", "squat::Corrected._correct", "- x[..., at]", "- block", "squat.py"),
    _fault(
        "the block itself is not open", "squat::Corrected._correct", ", start:", ", start + self.block :", "-k squat"
    ),
    _fault("singular values are squared", "squat::Corrected.fit_gram", ".sqrt()", "", "-k squat"),
    _fault(
        "SQuat keeps the first chunk's subspace",
        "squat::Corrected.fit_gram",
        "gram +",
        "",
        "-k squat",
    ),
    _fault(
        "a chunk weighs twice what came before",
        "squat::Corrected.fit_gram",
        "= gram",
        "= 2 * gram",
        "-k squat",
    ),
    _fault(
        "the weakest directions",
        "squat::Corrected.fit_gram",
        "[:, -self.rank :].flip(-1)",
        "[:, : self.rank]",
        "-k squat",
    ),
    _fault("the noise is the whole energy", "squat::Corrected.fit_gram", "[:, : -self.rank]", "", "-k squat"),
    _fault(
        "earlier chunks made no noise",
        "squat::Corrected.fit_gram",
        "noise = noise + state[:, -1, 0]",
        "pass",
        "squat.py",
    ),
    _fault(
        "the padding of a head is quiet",
        "squat::Corrected.__init__",
        "head_size - self",
        "d - self",
        "squat.py",
    ),
    _fault("the floor is a ceiling", "squat::Corrected._correct", "clamp_min", "clamp_max", "squat.py"),
    _fault(
        "boosted keys are not corrected",
        "squat::BoostedSQuatKeys._quantize",
        "state,",
        "None,",
        "squat_boosted.py",
    ),
    _fault(
        "every block boosts what the first one does",
        "squat::BoostedSQuatKeys._quantize",
        "., at",
        "., : at.stop - at.start",
        "squat_boosted.py",
    ),
    _fault("a corrected key has no end", "squat::Corrected._correct", ".clamp(-LIMIT, LIMIT)", "", "squat.py"),
    _fault(
        "a block may be the head and its padding",
        "squat::Corrected.__init__",
        "self.block >= geometry.head_size",
        "self.block >= geometry.d",
        "squat.py",
    ),
)
BEFORE_ROPE = (
    _fault("RoPE is put on twice", "rope::Rope.undo", "-s", "s", BEFORE),
    _fault("a scaled rotation is taken for a rotation", "rope::Rope.undo", "c * c + s * s", "1", "-k squat_pre"),
    _fault(
        "neighbours turn as halves do",
        "rope::Rope._turned",
        'if self.pairing == "interleaved":',
        "if False:",
        "-k squat_pre",
    ),
    _fault("the table ends with its rows", "rope::Rope._at", ".clamp(0, len(self.table) - 1)", "", BEFORE),
    _fault(
        "keys before RoPE are read as they lie",
        "page::PageFormat._after_rope",
        "if self.rope is None:\n            return key",
        "return key",
        "-k squat_pre",
    ),
    _fault("keys are read a position further", "page::PageFormat._after_rope", "+", "+ 1 +", "-k squat_pre"),
    _fault(
        "keys are packed as RoPE left them",
        "page::PageFormat.before_rope",
        "self.rope.undo(x, position)",
        "x",
        "-k squat_pre",
    ),
    _fault(
        "a page's position is that of its last unit",
        "page::PageFormat.write",
        "- unit[:, None] * self.unit",
        "",
        BEFORE,
    ),
    _fault(
        "every format keeps its keys before RoPE",
        "page::PageFormat.rope",
        "if self.keys.before_rope else None",
        "",
        BEFORE,
    ),
)
QJL = (
    _fault(
        "the Gaussian's constant on the sphere",
        "qjl::sphere_constant",
        "math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))",
        "math.sqrt(math.pi / 2)",
        "-k qjl_constant",
    ),
    _fault(
        "the outliers' constant is the head's",
        "qjl::SketchKeys._divide",
        "(self.n)",
        "(self.d)",
        "-k qjl",
    ),
    _fault(
        "independent rows have the sphere's constant",
        "qjl::SketchKeys._constant",
        "GAUSSIAN_CONSTANT if self.gaussian else",
        "",
        "qjl.py -k independent",
    ),
    _fault(
        "an option of outliers is ignored where there are none",
        "qjl::OneSketchKeys._divide",
        '"outlier_choice"',
        "",
        "qjl.py -k one_sketch",
    ),
    _fault("an angle's third bit is lost", "polar::ThirdBit._unpack_angles", "< 2", "< 1", "polar.py -k three_bit"),
    _fault(
        "a layer gets the values of all others",
        "by_layer::ByLayer.at",
        "in layers",
        "in layers[1:]",
        "schedules.py",
    ),
    _fault("a range ends before its last layer", "by_layer::_layers", "+ 1", "", "schedules.py"),
    _fault("layers may be named twice", "by_layer::ByLayer.of", "seen.update(layers)", "pass", "schedules.py"),
    _fault("the inliers' norm is the key's", "qjl::SketchKeys.pack", "inner.", "x.", "-k qjl"),
    _fault("QJL forgets earlier chunks", "qjl::SketchKeys.fit_sums", "state +", "", "-k qjl"),
    _fault("a prompt of 32 tokens is too short", "qjl::SketchKeys._choose", ">=", ">", "-k qjl"),
    _fault(
        "norms of the outliers count twice in a score",
        "qjl::SketchKeys.key_features",
        "- rows",
        "+ rows",
        "-k qjl",
    ),
    _fault("sketches of two layers overlap", "qjl::SketchKeys.__init__", "+ 2 *", "+", "qjl.py"),
    _fault("outliers in any order", "qjl::SketchKeys._choose", ".sort(dim=-1).values", "", "qjl.py"),
)
POLAR = (
    _fault("angles at the edge of their cell", "polar::PolarKeys._dequantize", "(angle + 0.5)", "angle", "polar.py"),
    _fault("radii at the edge of their cell", "polar::PolarKeys._dequantize", "(radius + 0.5)", "radius", "polar.py"),
    _fault(
        "the gap is looked for one angle too far",
        "polar::shortest_arc",
        "[:, :1] + TURN - s[:, -1:], s[:, 1:] - s[:, :-1]",
        "[:, 1:] - s[:, :-1], s[:, :1] + TURN - s[:, -1:]",
        "polar.py",
    ),
    _fault(
        "an angle wraps around the circle",
        "polar::PolarKeys._quantize",
        "torch.remainder(phi - phi0[:, None] + gap[:, None] / 2, TURN) - gap[:, None] / 2",
        "torch.remainder(phi - phi0[:, None], TURN)",
        "polar.py",
    ),
    _fault(
        "the paper's angles are clamped",
        "polar::PaperPolarKeys._quantize",
        "torch.remainder((phi / (TURN / 2**self.m)).round(), 2**self.m)",
        "(phi / (TURN / 2**self.m)).round().clamp(0, 2**self.m - 1)",
        "polar.py",
    ),
    _fault("neighbours of pairs", "polar::pair_order", "2 * first, 2 *", "first,", "polar.py"),
    _fault("pairs across the whole head", "polar::pair_order", "+ rotary", "+ d", "polar.py"),
)
INNERQ = (
    _fault("a dead channel's norm is not floored", "innerq::usable_norm", ".clamp_min(2.0**-6)", "", "innerq.py"),
    _fault(
        "InnerQ forgets earlier chunks", "innerq::HybridKeys.fit_top", "torch.maximum(state, norm)", "norm", "-k innerq"
    ),
    _fault("the norm without its root", "innerq::HybridKeys.fit_top", ".sqrt()", "", "-k innerq"),
    _fault("the worse mode wins", "innerq::hybrid_quantize", "<", ">", "-k innerq"),
    _fault("nought is negative", "innerq::hybrid_quantize", ">=", ">", "innerq.py"),
    _fault(
        "a norm is rounded after the keys were divided",
        "innerq::usable_norm",
        "half(norm)",
        "norm",
        "innerq.py",
    ),
)
KLT = (
    _fault("digits go to the channels that gain least", "klt::allocated.gain", "-variance", "variance", "klt.py"),
    _fault("means turn though keys do not", "klt::constants_of", "if not _less", "if False and _less", "klt.py"),
    _fault("means never turn", "klt::constants_of", "if not _less", "if True or _less", "klt.py"),
    _fault(
        "all slabs have the mean of the first",
        "klt::TransformedKeys._phases",
        "+ torch.arange",
        "* 0 * torch.arange",
        "klt.py",
    ),
    _fault("a pair turns the other way", "turning::Turning.matrix", "-mean", "mean", "turning.py"),
    _fault("an angle is that of the first token", "turning::_theta", "angle[1], 2", "angle[1], 1 << 40", "turning.py"),
    _fault("any table is a turning", "turning::_theta", "<= NEAR", "< 1e9", "turning.py"),
    _fault("slabs turn at their beginnings", "turning::Turning.phases", "+ MIDDLE", "", "turning.py"),
    _fault(
        "the coarse table starts late",
        "turning::Turning.tables",
        "SLAB * FINE * at[:COARSE]",
        "SLAB * FINE * at[:COARSE] + 1",
        "turning.py",
    ),
    _fault("no query is regular", "klt::constants_of", "REGULAR", "1e-6", "klt.py"),
    _fault(
        "keys keep their mean",
        "klt::constants_of",
        "pad(mean, (0, short))",
        "pad(0 * mean, (0, short))",
        "klt.py",
    ),
    _fault(
        "the covariance of keys as they are", "klt::constants_of", "root @ covariance @ root", "covariance", "klt.py"
    ),
    _fault(
        "digits from the highest to the lowest",
        "klt::Transform.features",
        "digit",
        "digit.flip(-1)",
        "klt.py",
    ),
    _fault("a channel's middle is not taken off", "klt::Transform.features", "self.most", "0", "klt.py"),
    _fault("errors weigh the same in all channels", "klt::Transform.of", "s.square()", "torch.ones_like(s)", "klt.py"),
    _fault("the third bit is the first", "klt::SearchedValues.unpack", "<< self.low", "<< 0", "klt.py"),
    _fault("the first scale that is tried", "search::searched", "error < least", "least.isinf()", "klt.py"),
    _fault(
        "scales before they are rounded", "search::searched", "positive_half(rms * factor)", "rms * factor", "klt.py"
    ),
    _fault("the size of what is not stored", "search::searched", "* stored", "", "klt.py"),
)
LAYOUT = (
    _fault(
        "a group's last channel is left out",
        "values::TokenValues.unpack",
        "(g + 1) * self.group",
        "(g + 1) * self.group - 1",
        "accuracy.py -k within_bounds",
    ),
    _fault(
        "scales lie token by token",
        "values::TokenValues.pack",
        "(scales, -1).transpose(-2, -1)",
        "(scales, -1).reshape(*x.shape[:-2], self.groups, SLAB)",
        "accuracy.py -k within_bounds",
    ),
    _fault(
        "planes of neighbouring channels",
        "planes::_merge",
        "i,",
        "p - i,",
        "planes.py",
    ),
    _fault(
        "a page of another making is read",
        "page::PageFormat.packed_slabs",
        "& (head[:, :4].view(torch.int32) == MAGIC)",
        "",
        "page.py",
    ),
    _fault(
        "a window is rounded down",
        "page::PageFormat.W",
        "round_up(self.settings.W, self.unit)",
        "self.settings.W // self.unit * self.unit",
        "page.py",
    ),
    _fault(
        "head padding is not counted",
        "page::PageFormat.bits_per_element",
        "head_size",
        "d",
        "page.py",
    ),
    _fault(
        "records on 64-byte boundaries",
        "page::PageFormat.record_bytes",
        "128",
        "64",
        "page.py",
    ),
    _fault(
        "fields touch each other",
        "fields::Region.of",
        "end = round_up(end + f.nbytes, ALIGN)",
        "end = end + f.nbytes",
        "fields.py",
    ),
)
OPTIONS = (
    _fault("true is a number", "option::Option.check", "and not isinstance(value, bool)", "", "options.py"),
    _fault(
        "a value above the largest is accepted",
        "option::Option.check",
        "<= self.high",
        "",
        "options.py",
    ),
    _fault(
        "an option is accepted and ignored",
        "settings::check_names",
        "read:",
        "readers():",
        "options.py",
    ),
    _fault("a null is a default", "settings::check_names", "is None", "is ...", "options.py"),
    _fault("no sinks by default", "settings", "4,", "0,", "options.py"),
    Fault(
        "peers get our sinks",
        "vllm_kvq/eval/peers/__init__.py",
        '"S": 0,',
        "",
        f"{TESTS}/peers/test_peer_formats.py",
    ),
    _fault(
        "a default of another codec's option",
        "table::Format.settings",
        "if name not in own or own[name] in shared",
        "if True",
        "options.py",
    ),
    _fault("the factor upside down", "table::Format.capacity_factor", "16 /", "", "docs.py"),
)
ROUNDTRIP = (
    _fault(
        "the first token fills the last group",
        "roundtrip::through_pages",
        ".clamp_max(tokens - 1)",
        " % tokens",
        "robustness.py",
    ),
    _fault(
        "heads take each other's state",
        "roundtrip::through_pages",
        "repeat(units, 1, 1)",
        "repeat_interleave(units, dim=0)",
        "accuracy.py",
    ),
    _fault(
        "query heads of another KV head",
        "constants::grouped",
        "(1, (heads, -1)).transpose(0, 1)",
        "(1, (-1, heads)).transpose(0, 2).transpose(1, 2)",
        "accuracy.py",
    ),
)
FAULTS: tuple[Fault, ...] = (*QUANT, *SQUAT, *BEFORE_ROPE, *QJL, *POLAR, *INNERQ, *KLT, *LAYOUT, *OPTIONS, *ROUNDTRIP)
