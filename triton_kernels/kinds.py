"""The kinds of codecs that the kernels know, numbered: the values of their constants KEYS and VALUES.

Plain numbers, without Triton: kernels/gpu/triton_layout.py gives each codec its kind.
"""

CHANNEL, HYBRID, POLAR, TRANSFORMED = range(4)
"""Kinds of keys: SQuat's and KIVI's, InnerQ's, PolarQuant's, those of transform coding."""

TOKEN, HYBRID_VALUES = range(2)
"""Kinds of values: per token, and InnerQ's."""
