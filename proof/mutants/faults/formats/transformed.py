"""Faults in klt: its constants, its means that turn, its values."""

from __future__ import annotations

from proof.mutants.fault import Fault
from proof.mutants.faults.formats._written import fault

FAULTS: tuple[Fault, ...] = (
    fault("digits go to the channels that gain least", "klt::allocated.gain", "-variance", "variance", "klt.py"),
    fault("means turn though keys do not", "klt::constants_of", "if not _less", "if False and _less", "klt.py"),
    fault("means never turn", "klt::constants_of", "if not _less", "if True or _less", "klt.py"),
    fault(
        "all slabs have the mean of the first",
        "klt::TransformedKeys._phases",
        "+ torch.arange",
        "* 0 * torch.arange",
        "klt.py",
    ),
    fault("a pair turns the other way", "turning::Turning.matrix", "-mean", "mean", "turning.py"),
    fault("an angle is that of the first token", "turning::_theta", "angle[1], 2", "angle[1], 1 << 40", "turning.py"),
    fault("any table is a turning", "turning::_theta", "<= NEAR", "< 1e9", "turning.py"),
    fault("slabs turn at their beginnings", "turning::Turning.phases", "+ MIDDLE", "", "turning.py"),
    fault(
        "the coarse table starts late",
        "turning::Turning.tables",
        "SLAB * FINE * at[:COARSE]",
        "SLAB * FINE * at[:COARSE] + 1",
        "turning.py",
    ),
    fault("no query is regular", "klt::constants_of", "REGULAR", "1e-6", "klt.py"),
    fault(
        "keys keep their mean",
        "klt::constants_of",
        "pad(mean, (0, short))",
        "pad(0 * mean, (0, short))",
        "klt.py",
    ),
    fault(
        "the covariance of keys as they are", "klt::constants_of", "root @ covariance @ root", "covariance", "klt.py"
    ),
    fault(
        "digits from the highest to the lowest",
        "klt::Transform.features",
        "digit",
        "digit.flip(-1)",
        "klt.py",
    ),
    fault("a channel's middle is not taken off", "klt::Transform.features", "self.most", "0", "klt.py"),
    fault("errors weigh the same in all channels", "klt::Transform.of", "s.square()", "torch.ones_like(s)", "klt.py"),
    fault("the third bit is the first", "klt::SearchedValues.unpack", "<< self.low", "<< 0", "klt.py"),
    fault("the first scale that is tried", "search::fitted", "error < least", "least.isinf()", "klt.py"),
    fault("a scale that fits no codes", "search::fitted", "seen / size.clamp_min(LEAST)", "best", "klt.py"),
    fault("scales fit whatever the weights", "search::fitted", "x * level * weight", "x * level", "klt.py"),
    fault("the size of what is not stored", "search::fitted", "* stored", "", "klt.py"),
    fault("the first scale around a number", "search::searched", "errors.argmin", "0 * errors.argmin", "klt.py"),
    fault(
        "codes belong to a scale that is not stored",
        "search::searched",
        "rounded(y, scale_of(byte)",
        "rounded(y, fitted(y, step, most, weight)",
        "klt.py",
    ),
    fault("scales around another number", "scales::around", "below - 1", "below + 1", "scales.py"),
    fault("two short fields in one place", "fields::Region.of", "end + ALIGN // 2 if", "end if", "fields.py"),
)
