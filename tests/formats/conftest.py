"""Tests of the codecs, without kernels."""

from one_thread import one_thread

__all__ = ["one_thread"]
