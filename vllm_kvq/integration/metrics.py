"""Our numbers, next to vLLM's own, on `/metrics`.

What is cached is known in the engine core, what was clamped in the workers, and API servers answer a scrape. So each
process writes its numbers into a file of its own, in the form of prometheus_client's multiprocess mode, and whoever
answers merges the files. Where vLLM runs several API servers it has a folder for such files. Where it runs one it has
none: then the process that the user starts makes one, and adds it to the registry that vLLM exposes.

Names begin with `vllm:`, and series have vLLM's own labels: dashboards and scrape filters for vLLM then find them. (A
stat logger plugin of vLLM could export them, too, but as soon as one is installed, vLLM ignores --disable-log-stats.)
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvq")

VLLMS_FOLDER, OUR_FOLDER = "PROMETHEUS_MULTIPROC_DIR", "KVQ_METRICS_DIR"
"""Variables that name the folder: vLLM's, and ours, which only processes of one server use among themselves."""


@dataclass(frozen=True)
class Metric:
    name: str
    help: str
    counts: bool = False
    """Whether it only ever grows: processes' values are then added up. For a gauge, the newest value counts."""

    def __post_init__(self) -> None:
        if self.counts and self.name.endswith("_total"):
            raise ValueError(f"{self.name}: prometheus_client adds _total itself")


PACKED = Metric("vllm:kvq_packed_tokens", "Tokens of running requests that are read from packed pages.")
FULL_PRECISION = Metric(
    "vllm:kvq_full_precision_tokens", "Tokens of running requests that are read in full precision: sinks and window."
)
SIDECAR_BYTES = Metric("vllm:kvq_sidecar_bytes", "Bytes of running requests' sidecars and sink pages, in all layers.")
BITS = Metric(
    "vllm:kvq_bits_per_element",
    "Bits that a cached number takes now, with sidecars, sink pages and what is unused in blocks; 0 if none is cached.",
)
CAPACITY = Metric("vllm:kvq_capacity_tokens", "Tokens that fit into the cache if each request has the maximum length.")
INFO = Metric("vllm:kvq_info", "What serves: always 1, the labels say it.")
CLAMPED = Metric(
    "vllm:kvq_clamped", "Keys and values that were inf, nan or too large and were replaced before packing.", counts=True
)
METRICS = (PACKED, FULL_PRECISION, SIDECAR_BYTES, BITS, CAPACITY, INFO, CLAMPED)

AT_START = 1.0
"""The stamp of what is set at start: earlier than that of any count, even after the clock was set back."""
FILE_BYTES = 1 << 16
"""As prometheus_client's own; ours have about 2 KB in them."""

_folder: tempfile.TemporaryDirectory[str] | None = None
"""Belongs to the process that made it, until that exits."""


def open_folder() -> None:
    """In the process that the user starts, before the engine's processes, which inherit where to write.

    What that process inherited itself is the folder of another server, which started this one.
    """
    global _folder
    if _folder is not None or VLLMS_FOLDER in os.environ or multiprocessing.parent_process() is not None:
        return
    _folder = tempfile.TemporaryDirectory(prefix="vllm-kvq-metrics-")
    os.environ[OUR_FOLDER] = _folder.name
    MultiProcessCollector(REGISTRY, path=_folder.name)


def _read_folder() -> Path | None:
    """Where a server reads files; None where none does, as in a process on another machine."""
    folder = Path(os.environ.get(VLLMS_FOLDER) or os.environ.get(OUR_FOLDER) or "")
    return folder if folder.is_dir() and folder.name else None


@functools.cache
def _file(name: str, pid: int) -> MmapedDict | None:
    """This process's file of a kind."""
    folder = _read_folder()
    return None if folder is None else _make(folder / f"{name}_kvq{pid}.db", {})


def _make(path: Path, values: dict[str, float]) -> MmapedDict | None:
    """A file that readers, who take no lock, find as it was before or with these values by their keys.

    None where the disk is full: the kernel kills a process that writes to a mapped page for which there is no room.
    """
    made = path.with_suffix(".new")
    try:
        with made.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
        entries, now = MmapedDict(str(made)), time.time()
        for key, value in values.items():
            entries.write_value(key, value, now)
        made.replace(path)
    except OSError as error:
        made.unlink(missing_ok=True)
        logger.warning_once("kvq: /metrics is out of date: %s can't be written: %s", path.parent, error.strerror)
        return None
    return entries


@dataclass(frozen=True)
class Series:
    """The metrics of one engine, as this process knows them."""

    model_name: str
    engine: str

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Series:
        """With the labels that vLLM gives this engine's own metrics."""
        index = vllm_config.parallel_config.data_parallel_index
        return cls(str(vllm_config.model_config.served_model_name), str(index))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """What is known when the server starts."""
        if (file := _file("gauge_mostrecent", os.getpid())) is not None:
            file.write_value(self._key(metric, labels), value, AT_START)

    def set_together(self, values: dict[Metric, float]) -> None:
        """Numbers that belong together, always the same ones: a scrape finds all of them, or those before."""
        if (folder := _read_folder()) is not None:
            keys = {self._key(metric, {}): value for metric, value in values.items()}
            if (file := _make(folder / f"gauge_mostrecent_kvqheld{os.getpid()}.db", keys)) is not None:
                file.close()

    def add(self, metric: Metric, more: int) -> None:
        if (file := _file("counter", os.getpid())) is not None:
            key = self._key(metric, {})
            file.write_value(key, file.read_value(key)[0] + more, time.time())

    def _key(self, metric: Metric, labels: dict[str, str]) -> str:
        name = f"{metric.name}_total" if metric.counts else metric.name
        every = {"model_name": self.model_name, "engine": self.engine, **labels}
        return mmap_key(metric.name, name, list(every), list(every.values()), metric.help)
