"""The constants that a server of a model has: those of its file, or those that it would fit, by its own code in a
process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvq.integration.plan.calibration import ByLayer, Source, digest_of, read
from vllm_kvq.integration.preview.apart import Failed, apart
from vllm_kvq.integration.preview.dry_start import WouldNotStart, dry_start, without_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

LENGTH = 256
"""Tokens of the requests for which a start that serves none is planned."""
CACHE_BYTES = 1 << 29


@dataclass(frozen=True)
class Server:
    model: str
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"

    def source(self) -> Source | None:
        """Where its constants come from; None if it has none. WouldNotStart, with a sentence."""
        flags = {
            "--kv-cache-dtype": self.format,
            "--additional-config": json.dumps({"kvq": dict(self.options)}),
            "--dtype": self.dtype,
            "--max-model-len": str(LENGTH),
            "--kv-cache-memory-bytes": str(CACHE_BYTES),
        }
        with without_kernels():
            served = dry_start([self.model, *(word for flag in flags.items() for word in flag)]).served
        found: Source | None = served.calibration
        return found


@dataclass(frozen=True)
class Fitted:
    constants: ByLayer
    path: Path | None
    """Where servers look for them."""
    belongs: Mapping[str, str]
    """What they belong to, as their file says."""
    tokens: int
    """How many of the user's texts' tokens were used."""

    @property
    def digest(self) -> str:
        return digest_of(self.constants)


def fitted(server: Server, texts: Sequence[str] | None = None) -> Fitted:
    """By a start of this server: fitted to the bundled texts, which leaves a file for all servers, or to `texts`, which
    leaves none. Raises Failed, with a sentence."""
    found: Fitted = apart(_fitted, server, texts)
    return found


@dataclass
class Known:
    """What servers of one model have, with any of our formats; asked once for each."""

    model: str
    dtype: str
    _known: dict[str, tuple[ByLayer, str] | ValueError] = field(default_factory=dict, repr=False)
    _read: dict[Path, tuple[ByLayer, str]] = field(default_factory=dict, repr=False)

    def constants(self, name: str, options: Mapping[str, Any]) -> ByLayer:
        """ValueError, with a sentence, if no such server would start."""
        return self._of(name, options)[0]

    def digest(self, name: str, options: Mapping[str, Any]) -> str:
        return self._of(name, options)[1]

    def _of(self, name: str, options: Mapping[str, Any]) -> tuple[ByLayer, str]:
        key = json.dumps([name, dict(options)], sort_keys=True)
        if key not in self._known:
            try:
                self._known[key] = self._found(Server(self.model, name, options, self.dtype))
            except (Failed, WouldNotStart, ValueError) as error:
                self._known[key] = ValueError(str(error))
        if isinstance(found := self._known[key], ValueError):
            raise found
        return found

    def _found(self, server: Server) -> tuple[ByLayer, str]:
        source = server.source()
        if source is None:
            raise ValueError(f"{server.format} has no constants; use a calibrated format")
        path = source.path
        if path is None or path not in self._read:
            if path is not None and source.found is not None:
                found = read(path)
            else:
                made = fitted(server)
                found = dict(made.constants), made.digest
            if path is None:
                return found
            self._read[path] = found
        return self._read[path]


# -- in the process of its own ----------------------------------------------------------------------------------------
def _fitted(server: Server, texts: Sequence[str] | None) -> Fitted:
    # neither kernels nor compiled graphs play a part in it
    os.environ |= {"VLLM_KVQ_KERNELS": "torch", "TORCHDYNAMO_DISABLE": "1"}
    from vllm import LLM

    from vllm_kvq.integration.plan.plan import plan
    from vllm_kvq.integration.worker.calibration import fitting

    with nullcontext() if texts is None else fitting.fitting_to(texts) as own:
        llm = LLM(
            server.model,
            kv_cache_dtype=server.format,
            dtype=server.dtype,
            max_model_len=LENGTH,
            max_num_batched_tokens=fitting.AT_ONCE,
            kv_cache_memory_bytes=CACHE_BYTES,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            additional_config={"kvq": dict(server.options)},
        )
    config = llm.llm_engine.vllm_config
    formats = dict(_packed(config))
    served = plan(config)
    source = Source.of(config, served.options, sorted(served.layers.packed_layers))
    if source is None:
        raise ValueError(f"{server.format} has no constants; use a calibrated format")
    constants = {layer: of.each(lambda x: x.cpu()) for layer, of in sorted(formats.items())}
    return Fitted(constants, source.path, source.belongs, 0 if own is None else own.tokens)


def _packed(config: VllmConfig) -> Iterator[tuple[int, Any]]:
    """The constants of each packed layer."""
    for layer in config.compilation_config.static_forward_context.values():
        if (packed := getattr(getattr(layer, "impl", None), "packed", None)) is not None:
            yield packed.fmt.geometry.layer, packed.fmt.geometry.constants
