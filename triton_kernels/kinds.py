"""The kinds of codecs that the kernels know, numbered: what their constants KEYS and VALUES say.

Plain numbers, without Triton: kernels/gpu/triton_layout.py gives each codec its kind.
"""

CHANNEL, HYBRID, POLAR = range(3)
"""Keys of SQuat and KIVI, of InnerQ, of PolarQuant."""

TOKEN, HYBRID_VALUES = range(2)
"""Values per token and group, and InnerQ's."""
