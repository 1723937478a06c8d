"""Formats: byte layouts and plain PyTorch references. Nothing here imports vllm."""

from vllm_kvq.formats.codec import Geometry
from vllm_kvq.formats.page import PageFormat
from vllm_kvq.formats.roundtrip import roundtrip
from vllm_kvq.formats.table import FORMATS, Format, get_format

__all__ = ["FORMATS", "Format", "Geometry", "PageFormat", "get_format", "roundtrip"]
