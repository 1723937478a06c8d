"""Faults in the methods of the papers, and in what quantizes for them."""

from __future__ import annotations

from proof.mutants.fault import Fault
from proof.mutants.faults.formats._written import fault

BEFORE = "before_rotation.py"

QUANT = (
    fault("codes round down", "quant::affine_codes", "round", "floor", "-k innerq"),
    fault("codes may pass the last one", "quant::affine_codes", ".clamp(0, 2**bits - 1)", "", "robustness.py"),
    fault("a range has one step too many", "quant::affine_parameters", "(2**bits - 1)", "2**bits", "-k squat"),
    fault("codes fit parameters before float16", "quant::affine_parameters", "half(lo)", "lo", "-k squat"),
    fault("nan becomes the largest number", "quant::sanitize", "0.0", "LIMIT", "robustness.py"),
    fault("the scale of equal values is zero", "quant::positive_half", ".clamp_min(TINY)", "", "robustness.py"),
    fault("a norm is infinite in float16", "quant::half", "clamp(-65504.0, 65504.0).", "", "robustness.py"),
    fault("only nan is counted as replaced", "quant::sanitize", "(clean != f)", "f.isnan()", "robustness.py"),
)
SQUAT = (
    fault("lambda the wrong way up", "squat::Corrected._correct", "1 /", "", "-k squat"),
    fault("the error is added once more", "squat::Corrected._correct", "- z", "+ z", "-k squat"),
    fault("the newest error on the original keys", "squat::Corrected._correct", "- x[..., at]", "- block", "squat.py"),
    fault(
        "the block itself is not open", "squat::Corrected._correct", ", start:", ", start + self.block :", "-k squat"
    ),
    fault("singular values are squared", "squat::Corrected.fit_gram", ".sqrt()", "", "-k squat"),
    fault(
        "SQuat keeps the first chunk's subspace",
        "squat::Corrected.fit_gram",
        "gram +",
        "",
        "-k squat",
    ),
    fault(
        "a chunk weighs twice what came before",
        "squat::Corrected.fit_gram",
        "= gram",
        "= 2 * gram",
        "-k squat",
    ),
    fault(
        "the weakest directions",
        "squat::Corrected.fit_gram",
        "[:, -self.rank :].flip(-1)",
        "[:, : self.rank]",
        "-k squat",
    ),
    fault("the noise is the whole energy", "squat::Corrected.fit_gram", "[:, : -self.rank]", "", "-k squat"),
    fault(
        "earlier chunks made no noise",
        "squat::Corrected.fit_gram",
        "noise = noise + state[:, -1, 0]",
        "pass",
        "squat.py",
    ),
    fault(
        "the padding of a head is quiet",
        "squat::Corrected.__init__",
        "head_size - self",
        "d - self",
        "squat.py",
    ),
    fault("the floor is a ceiling", "squat::Corrected._correct", "clamp_min", "clamp_max", "squat.py"),
    fault(
        "boosted keys are not corrected",
        "squat::BoostedSQuatKeys._quantize",
        "state,",
        "None,",
        "squat_boosted.py",
    ),
    fault(
        "every block boosts what the first one does",
        "squat::BoostedSQuatKeys._quantize",
        "., at",
        "., : at.stop - at.start",
        "squat_boosted.py",
    ),
    fault("a corrected key has no end", "squat::Corrected._correct", ".clamp(-LIMIT, LIMIT)", "", "squat.py"),
    fault(
        "a block may be the head and its padding",
        "squat::Corrected.__init__",
        "self.block >= geometry.head_size",
        "self.block >= geometry.d",
        "squat.py",
    ),
)
BEFORE_ROPE = (
    fault("RoPE is put on twice", "rope::Rope.undo", "-s", "s", BEFORE),
    fault("a scaled rotation is taken for a rotation", "rope::Rope.undo", "c * c + s * s", "1", "-k squat_pre"),
    fault(
        "neighbours turn as halves do",
        "rope::Rope._turned",
        'if self.pairing == "interleaved":',
        "if False:",
        "-k squat_pre",
    ),
    fault("the table ends with its rows", "rope::Rope._at", ".clamp(0, len(self.table) - 1)", "", BEFORE),
    fault(
        "keys before RoPE are read as they lie",
        "page::PageFormat._after_rope",
        "if self.rope is None:\n            return key",
        "return key",
        "-k squat_pre",
    ),
    fault("keys are read a position further", "page::PageFormat._after_rope", "+", "+ 1 +", "-k squat_pre"),
    fault(
        "keys are packed as RoPE left them",
        "page::PageFormat.before_rope",
        "self.rope.undo(x, position)",
        "x",
        "-k squat_pre",
    ),
    fault(
        "a page's position is that of its last unit",
        "page::PageFormat.write",
        "- unit[:, None] * self.unit",
        "",
        BEFORE,
    ),
    fault(
        "every format keeps its keys before RoPE",
        "page::PageFormat.rope",
        "if self.keys.before_rope else None",
        "",
        BEFORE,
    ),
)
QJL = (
    fault(
        "the Gaussian's constant on the sphere",
        "qjl::sphere_constant",
        "math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))",
        "math.sqrt(math.pi / 2)",
        "-k qjl_constant",
    ),
    fault(
        "the outliers' constant is the head's",
        "qjl::SketchKeys._divide",
        "(self.n)",
        "(self.d)",
        "-k qjl",
    ),
    fault(
        "independent rows have the sphere's constant",
        "qjl::SketchKeys._constant",
        "GAUSSIAN_CONSTANT if self.gaussian else",
        "",
        "qjl.py -k independent",
    ),
    fault(
        "an option of outliers is ignored where there are none",
        "qjl::OneSketchKeys._divide",
        '"outlier_choice"',
        "",
        "qjl.py -k one_sketch",
    ),
    fault("an angle's third bit is lost", "polar::ThirdBit._unpack_angles", "< 2", "< 1", "polar.py -k three_bit"),
    fault(
        "a layer gets the values of all others",
        "by_layer::ByLayer.at",
        "in layers",
        "in layers[1:]",
        "schedules.py",
    ),
    fault("a range ends before its last layer", "by_layer::_layers", "+ 1", "", "schedules.py"),
    fault("layers may be named twice", "by_layer::ByLayer.of", "seen.update(layers)", "pass", "schedules.py"),
    fault("the inliers' norm is the key's", "qjl::SketchKeys.pack", "inner.", "x.", "-k qjl"),
    fault("QJL forgets earlier chunks", "qjl::SketchKeys.fit_sums", "state +", "", "-k qjl"),
    fault("a prompt of 32 tokens is too short", "qjl::SketchKeys._choose", ">=", ">", "-k qjl"),
    fault(
        "norms of the outliers count twice in a score",
        "qjl::SketchKeys.key_features",
        "- rows",
        "+ rows",
        "-k qjl",
    ),
    fault("sketches of two layers overlap", "qjl::SketchKeys.__init__", "+ 2 *", "+", "qjl.py"),
    fault("outliers in any order", "qjl::SketchKeys._choose", ".sort(dim=-1).values", "", "qjl.py"),
)
POLAR = (
    fault("angles at the edge of their cell", "polar::PolarKeys._dequantize", "(angle + 0.5)", "angle", "polar.py"),
    fault("radii at the edge of their cell", "polar::PolarKeys._dequantize", "(radius + 0.5)", "radius", "polar.py"),
    fault(
        "the gap is looked for one angle too far",
        "polar::shortest_arc",
        "[:, :1] + TURN - s[:, -1:], s[:, 1:] - s[:, :-1]",
        "[:, 1:] - s[:, :-1], s[:, :1] + TURN - s[:, -1:]",
        "polar.py",
    ),
    fault(
        "an angle wraps around the circle",
        "polar::PolarKeys._quantize",
        "torch.remainder(phi - phi0[:, None] + gap[:, None] / 2, TURN) - gap[:, None] / 2",
        "torch.remainder(phi - phi0[:, None], TURN)",
        "polar.py",
    ),
    fault(
        "the paper's angles are clamped",
        "polar::PaperPolarKeys._quantize",
        "torch.remainder((phi / (TURN / 2**self.m)).round(), 2**self.m)",
        "(phi / (TURN / 2**self.m)).round().clamp(0, 2**self.m - 1)",
        "polar.py",
    ),
    fault("neighbours of pairs", "polar::pair_order", "2 * first, 2 *", "first,", "polar.py"),
    fault("pairs across the whole head", "polar::pair_order", "+ rotary", "+ d", "polar.py"),
)
INNERQ = (
    fault("a dead channel's norm is not floored", "innerq::usable_norm", ".clamp_min(2.0**-6)", "", "innerq.py"),
    fault(
        "InnerQ forgets earlier chunks", "innerq::HybridKeys.fit_top", "torch.maximum(state, norm)", "norm", "-k innerq"
    ),
    fault("the norm without its root", "innerq::HybridKeys.fit_top", ".sqrt()", "", "-k innerq"),
    fault("the worse mode wins", "innerq::hybrid_quantize", "<", ">", "-k innerq"),
    fault("nought is negative", "innerq::hybrid_quantize", ">=", ">", "innerq.py"),
    fault(
        "a norm is rounded after the keys were divided",
        "innerq::usable_norm",
        "half(norm)",
        "norm",
        "innerq.py",
    ),
)
FAULTS: tuple[Fault, ...] = (*QUANT, *SQUAT, *BEFORE_ROPE, *QJL, *POLAR, *INNERQ)
