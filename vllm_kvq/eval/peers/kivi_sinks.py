"""kivi2_sinks, kivi4_sinks: KIVI (kivi.py) whose first 32 tokens stay in full precision. The bytes are KIVI's."""

from __future__ import annotations

from dataclasses import replace

from vllm_kvq.formats.methods.kivi import FORMATS as KIVI

FORMATS = tuple(
    replace(
        kivi,
        name=f"{kivi.name}_sinks",
        title=f"{kivi.title}, with sinks",
        defaults={**kivi.defaults, "S": 32},
        public=False,
    )
    for kivi in KIVI
)
