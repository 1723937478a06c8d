"""Faults in vllm_kvq/formats."""

from __future__ import annotations

from pathlib import Path

from proof.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[3]
HOME = "vllm_kvq/formats"
TESTS = "tests/formats"
PAPERS = f"{TESTS}/test_papers.py"
BEFORE = "before_rotation.py"


def _fault(name: str, module: str, before: str, after: str, tests: str) -> Fault:
    """`tests`: of tests/formats, or of test_papers.py where it is an option."""
    where = f"{PAPERS} {tests}" if tests.startswith("-k") else f"{TESTS}/test_{tests}"
    (file,) = (ROOT / HOME).rglob(f"{module}.py")
    return Fault(name, str(file.relative_to(ROOT)), before, after, where)


QUANT = (
    _fault(
        "codes round down", "quant", ".round().clamp(0, 2**bits - 1)", ".floor().clamp(0, 2**bits - 1)", "-k innerq"
    ),
    _fault("codes may pass the last one", "quant", ".round().clamp(0, 2**bits - 1)", ".round()", "robustness.py"),
    _fault("a range has one step too many", "quant", "(hi - lo) / (2**bits - 1)", "(hi - lo) / 2**bits", "-k squat"),
    _fault("codes fit parameters before float16", "quant", "half(lo)\n", "lo\n", "-k squat"),
    _fault("nan becomes the largest number", "quant", "nan=0.0", "nan=LIMIT", "robustness.py"),
    _fault("the scale of equal values is zero", "quant", "half(x).clamp_min(TINY)", "half(x)", "robustness.py"),
    _fault("a norm is infinite in float16", "quant", "x.clamp(-65504.0, 65504.0).half()", "x.half()", "robustness.py"),
    _fault("only nan is counted as replaced", "quant", "(clean != f).sum()", "f.isnan().sum()", "robustness.py"),
)
SQUAT = (
    _fault("lambda the wrong way up", "squat", "clamp_min(1 / self.lam)", "clamp_min(self.lam)", "-k squat"),
    _fault("the error is added once more", "squat", "block - z @ self._pull", "block + z @ self._pull", "-k squat"),
    _fault("the newest error on the original keys", "squat", "s) - x[..., at]", "s) - block", "squat.py"),
    _fault("the block itself is not open", "squat", "u[..., start:]", "u[..., start + self.block :]", "-k squat"),
    _fault("singular values are squared", "squat", ".flip(-1).sqrt()", ".flip(-1)", "-k squat"),
    _fault(
        "SQuat keeps the first chunk's subspace",
        "squat",
        "gram = gram + before",
        "gram = before",
        "-k squat",
    ),
    _fault(
        "a chunk weighs twice what came before",
        "squat",
        "gram = gram + before.transpose",
        "gram = 2 * gram + before.transpose",
        "-k squat",
    ),
    _fault(
        "the weakest directions",
        "squat",
        "eigenvalues[:, -self.rank :].flip(-1)",
        "eigenvalues[:, : self.rank]",
        "-k squat",
    ),
    _fault("the noise is the whole energy", "squat", "eigenvalues[:, : -self.rank]", "eigenvalues", "-k squat"),
    _fault("earlier chunks made no noise", "squat", "noise = noise + state[:, -1, 0]", "pass", "squat.py"),
    _fault(
        "the padding of a head is quiet",
        "squat",
        "geometry.head_size - self.rank",
        "geometry.d - self.rank",
        "squat.py",
    ),
    _fault("the floor is a ceiling", "squat", "clamp_min(1 / self.lam)", "clamp_max(1 / self.lam)", "squat.py"),
    _fault(
        "boosted keys are not corrected",
        "squat",
        "state, lambda block, at: plain(block, boosted",
        "None, lambda block, at: plain(block, boosted",
        "squat_boosted.py",
    ),
    _fault(
        "every block boosts what the first one does",
        "squat",
        "boosted[..., at]",
        "boosted[..., : at.stop - at.start]",
        "squat_boosted.py",
    ),
    _fault("a corrected key has no end", "squat", ".clamp(-LIMIT, LIMIT)", "", "squat.py"),
    _fault(
        "a block may be the head and its padding",
        "squat",
        "self.block >= geometry.head_size",
        "self.block >= geometry.d",
        "squat.py",
    ),
)
BEFORE_ROPE = (
    _fault("RoPE is put on twice", "rope", "c / square, -s / square", "c / square, s / square", BEFORE),
    _fault("a scaled rotation is taken for a rotation", "rope", "square = c * c + s * s", "square = 1", "-k squat_pre"),
    _fault("neighbours turn as halves do", "rope", 'if self.pairing == "interleaved":', "if False:", "-k squat_pre"),
    _fault("the table ends with its rows", "rope", ".clamp(0, len(self.table) - 1)", "", BEFORE),
    _fault("keys before RoPE are read as they lie", "page", "        if self.rope is None:\n            return key\n",
           "        return key\n", "-k squat_pre"),
    _fault("keys are read a position further", "page", 'fields["position"][:, None] + ',
           'fields["position"][:, None] + 1 + ', "-k squat_pre"),
    _fault("keys are packed as RoPE left them", "page", "self.rope.undo(x, position)", "x", "-k squat_pre"),
    _fault("a page's position is that of its last unit", "page", " - unit[:, None] * self.unit", "", BEFORE),
    _fault("every format keeps its keys before RoPE", "page", " if self.keys.before_rope else None", "", BEFORE),
)  # fmt: skip
QJL = (
    _fault(
        "the Gaussian's constant on the sphere",
        "qjl",
        "math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))",
        "math.sqrt(math.pi / 2)",
        "-k qjl_constant",
    ),
    _fault(
        "the outliers' constant is the head's",
        "qjl",
        "self.scale_out = self._constant(self.n)",
        "self.scale_out = self._constant(self.d)",
        "-k qjl",
    ),
    _fault(
        "independent rows have the sphere's constant",
        "qjl",
        "return GAUSSIAN_CONSTANT if self.gaussian else sphere_constant(d)",
        "return sphere_constant(d)",
        "qjl.py -k independent",
    ),
    _fault(
        "an option of outliers is ignored where there are none",
        "qjl",
        'in ("m_out", "outlier_choice")',
        'in ("m_out",)',
        "qjl.py -k one_sketch",
    ),
    _fault("an angle's third bit is lost", "polar", "| high << 2", "| high << 1", "polar.py -k three_bit"),
    _fault(
        "a layer gets the values of all others",
        "by_layer",
        "for layers, value in self.named if layer in layers), self.rest)",
        "for layers, value in self.named if layer in layers[1:]), self.rest)",
        "schedules.py",
    ),
    _fault("a range ends before its last layer", "by_layer", "found[1]) + 1)", "found[1]))", "schedules.py"),
    _fault("layers may be named twice", "by_layer", "seen.update(layers)", "pass", "schedules.py"),
    _fault("the inliers' norm is the key's", "qjl", "half(inner.norm(dim=-1))", "half(x.norm(dim=-1))", "-k qjl"),
    _fault("QJL forgets earlier chunks", "qjl", "state is None else state + new", "state is None else new", "-k qjl"),
    _fault("a prompt of 32 tokens is too short", "qjl", "state[:, 1, :1] >= SLAB", "state[:, 1, :1] > SLAB", "-k qjl"),
    _fault(
        "norms of the outliers count twice in a score",
        "qjl",
        "self._outliers(fields) - rows @",
        "self._outliers(fields) + rows @",
        "-k qjl",
    ),
    _fault("sketches of two layers overlap", "qjl", "+ 2 * geometry.layer", "+ geometry.layer", "qjl.py"),
    _fault("outliers in any order", "qjl", ".indices.sort(dim=-1).values", ".indices", "qjl.py"),
)
POLAR = (
    _fault("angles at the edge of their cell", "polar", "phi0 + (angle + 0.5)", "phi0 + angle", "polar.py"),
    _fault("radii at the edge of their cell", "polar", "r0 + (radius + 0.5)", "r0 + radius", "polar.py"),
    _fault(
        "the gap is looked for one angle too far",
        "polar",
        "torch.cat([s[:, :1] + TURN - s[:, -1:], s[:, 1:] - s[:, :-1]], dim=1)",
        "torch.cat([s[:, 1:] - s[:, :-1], s[:, :1] + TURN - s[:, -1:]], dim=1)",
        "polar.py",
    ),
    _fault(
        "an angle wraps around the circle",
        "polar",
        "torch.remainder(phi - phi0[:, None] + gap[:, None] / 2, TURN) - gap[:, None] / 2",
        "torch.remainder(phi - phi0[:, None], TURN)",
        "polar.py",
    ),
    _fault(
        "the paper's angles are clamped",
        "polar",
        "torch.remainder((phi / (TURN / 2**self.m)).round(), 2**self.m)",
        "(phi / (TURN / 2**self.m)).round().clamp(0, 2**self.m - 1)",
        "polar.py",
    ),
    _fault("neighbours of pairs", "polar", "(2 * first, 2 * first + 1)", "(first, first + 1)", "polar.py"),
    _fault("pairs across the whole head", "polar", "first + rotary // 2)", "first + d // 2)", "polar.py"),
)
INNERQ = (
    _fault("a dead channel's norm is not floored", "innerq", ".clamp_min(2.0**-6)", "", "innerq.py"),
    _fault("InnerQ forgets earlier chunks", "innerq", "torch.maximum(state, norm)", "norm", "-k innerq"),
    _fault("the norm without its root", "innerq", "norm = top.sqrt()", "norm = top", "-k innerq"),
    _fault("the worse mode wins", "innerq", "keepdim=True) < error", "keepdim=True) > error", "-k innerq"),
    _fault("nought is negative", "innerq", "pack_sign_words(signed >= 0)", "pack_sign_words(signed > 0)", "innerq.py"),
    _fault(
        "a norm is rounded after the keys were divided",
        "innerq",
        "half(norm).clamp_min",
        "norm.clamp_min",
        "innerq.py",
    ),
)
KLT = (
    _fault("digits go to the channels that gain least", "klt", "return -variance[c]", "return variance[c]", "klt.py"),
    _fault("no query is regular", "klt", "+ REGULAR * torch.eye(d, ", "+ 1e-6 * torch.eye(d, ", "klt.py"),
    _fault(
        "keys keep their mean",
        "klt",
        "mean = pad(moments.mean, (0, short))",
        "mean = 0 * pad(moments.mean, (0, short))",
        "klt.py",
    ),
    _fault("the covariance of keys as they are", "klt", "eigh(root @ covariance @ root)", "eigh(covariance)", "klt.py"),
    _fault(
        "digits from the highest to the lowest",
        "klt",
        "* 4.0 ** self.digit[",
        "* 4.0 ** self.digit.flip(-1)[",
        "klt.py",
    ),
    _fault("a channel's middle is not taken off", "klt", "-(seen * self.most).sum", "-(seen * 0).sum", "klt.py"),
    _fault(
        "errors weigh the same in all channels", "klt", "mean, s.square(), ", "mean, torch.ones_like(s), ", "klt.py"
    ),
    _fault("the third bit is the first", "klt", "<< self.low\n", "<< 0\n", "klt.py"),
    _fault("the first scale that is tried", "search", "better = error < least", "better = least.isinf()", "klt.py"),
    _fault("scales before they are rounded", "search", "positive_half(rms * factor)", "rms * factor", "klt.py"),
    _fault("the size of what is not stored", "search", "y.square() * stored", "y.square()", "klt.py"),
)
LAYOUT = (
    _fault(
        "a group's last channel is left out",
        "values",
        "slice(g * self.group, (g + 1) * self.group)",
        "slice(g * self.group, (g + 1) * self.group - 1)",
        "accuracy.py -k within_bounds",
    ),
    _fault(
        "scales lie token by token",
        "values",
        "torch.cat(scales, -1).transpose(-2, -1)",
        "torch.cat(scales, -1).reshape(*x.shape[:-2], self.groups, SLAB)",
        "accuracy.py -k within_bounds",
    ),
    _fault(
        "planes of neighbouring channels",
        "planes",
        "split[..., i, :] << (bits * i)",
        "split[..., p - i, :] << (bits * i)",
        "planes.py",
    ),
    _fault("a page of another making is read", "page", " & (head[:, :4].view(torch.int32) == MAGIC)", "", "page.py"),
    _fault(
        "a window is rounded down",
        "page",
        "round_up(self.settings.W, self.unit)",
        "self.settings.W // self.unit * self.unit",
        "page.py",
    ),
    _fault(
        "head padding is not counted",
        "page",
        "(2 * self.N * self.geometry.head_size)",
        "(2 * self.N * self.geometry.d)",
        "page.py",
    ),
    _fault(
        "records on 64-byte boundaries",
        "page",
        "self.slab_region.nbytes, 128)",
        "self.slab_region.nbytes, 64)",
        "page.py",
    ),
    _fault(
        "fields touch each other",
        "fields",
        "end = round_up(end + f.nbytes, ALIGN)",
        "end = end + f.nbytes",
        "fields.py",
    ),
)
OPTIONS = (
    _fault("true is a number", "option", "and not isinstance(value, bool)\n        if", "\n        if", "options.py"),
    _fault(
        "a value above the largest is accepted",
        "option",
        "self.low <= value <= self.high",
        "self.low <= value",
        "options.py",
    ),
    _fault(
        "an option is accepted and ignored",
        "settings",
        "if name not in read:\n",
        "if name not in readers():\n",
        "options.py",
    ),
    _fault("a null is a default", "settings", "if value is None:", "if value is ...:", "options.py"),
    _fault("no sinks by default", "settings", 'in full precision", 4,', 'in full precision", 0,', "options.py"),
    Fault(
        "peers get our sinks",
        "vllm_kvq/eval/peers/__init__.py",
        '{"S": 0, **fmt.defaults}',
        "{**fmt.defaults}",
        f"{TESTS}/test_peer_formats.py",
    ),
    _fault(
        "a default of another codec's option",
        "table",
        "if name not in own or own[name] in shared",
        "if True",
        "options.py",
    ),
    _fault("the factor upside down", "table", "16 / self.bits_per_element", "self.bits_per_element", "docs.py"),
)
ROUNDTRIP = (
    _fault("the first token fills the last group", "roundtrip", ".clamp_max(tokens - 1)", " % tokens", "robustness.py"),
    _fault(
        "heads take each other's state",
        "roundtrip",
        "state.repeat(units, 1, 1)",
        "state.repeat_interleave(units, dim=0)",
        "accuracy.py",
    ),
    _fault(
        "query heads of another KV head",
        "constants",
        "query.unflatten(1, (heads, -1)).transpose(0, 1)",
        "query.unflatten(1, (-1, heads)).transpose(0, 2).transpose(1, 2)",
        "accuracy.py",
    ),
)
FAULTS: tuple[Fault, ...] = (*QUANT, *SQUAT, *BEFORE_ROPE, *QJL, *POLAR, *INNERQ, *KLT, *LAYOUT, *OPTIONS, *ROUNDTRIP)
