"""A model's constants as a file: where a calibrated format's come from, and whether they are those of this model.

A worker fits them once the weights are loaded (worker/calibration/), and keeps them in the user's cache under a name
that says what they belong to. All later servers read that file, or the one that the user names with the option
`calibration`. It is a file of safetensors:

    keys.LAYER, values.LAYER    float32 (KV heads of the whole model, ...), see formats/constants.py
    metadata                    version, codecs, layers, model: what they belong to; digest: of the tensors
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_kvq.formats.constants import Constants
from vllm_kvq.integration.plan.fingerprint import DIGITS, digest, model_meaning
from vllm_kvq.integration.plan.model.weights import weight_files, weights_folder
from vllm_kvq.kernels.folders import named_folder, user_folder
from vllm_kvq.problem import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvq.integration.plan.options import Options

VERSION = "2"
"""The version of how constants are fitted and written: files of another version are refused."""
SAMPLE = 1 << 16
"""Bytes at each end of a file of weights that tell it from another one."""
WRITTEN_ON_LOADING = ("attn_temperature_tuning",)
"""What a model's class changes in its configuration (Llama 4's, by --max-model-len), so that a file would have one name
before the model is loaded and another one afterwards."""

ByLayer = Mapping[int, Constants]
"""The constants of each packed layer, with the KV heads of all ranks."""


@dataclass(frozen=True)
class Source:
    """Where a server's constants come from: a file, or its own start."""

    path: Path | None
    """None: no file identifies the model's weights, or the user has no home; then every start fits the constants."""
    belongs: Mapping[str, str]
    """The metadata that the file must have."""
    found: str | None
    """The digest of the constants in the file; None: they are fitted when the weights are loaded."""

    @property
    def meaning(self) -> str:
        """For the fingerprint of pages."""
        return self.found or f"to be fitted to {dict(self.belongs)}"

    @classmethod
    def of(cls, vllm_config: VllmConfig, options: Options, layers: Sequence[int]) -> Source | None:
        """For these packed layers; None if nothing is calibrated. ValueError, with a sentence, for a file that belongs
        to others."""
        codecs = calibrated_codecs(options)
        if not codecs:
            return None
        belongs = {"version": VERSION, "codecs": " ".join(codecs), "layers": " ".join(map(str, layers))}
        if (model := _identity(vllm_config)) is not None:
            belongs["model"] = model
        if options.calibration is not None:
            path = Path(options.calibration).expanduser()
            return cls(path, belongs, _checked(path, belongs))
        folder = _folder()
        if model is None or folder is None:
            return cls(None, belongs, None)
        path = folder / f"{digest(belongs)}.safetensors"
        return cls(path, belongs, _checked(path, belongs) if path.exists() else None)


def fitting_problem(vllm_config: VllmConfig, source: Source) -> Problem | None:
    """Why this server can't fit constants when it starts, or none that it could use."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.is_hybrid:
        return Problem("constants are not fitted to hybrid models", "use --kv-cache-dtype kitty2")
    if source.found is not None:
        return None
    once = "start the model once without {}, which saves the constants for later starts"
    checks = (
        (parallel.pipeline_parallel_size > 1, "of one pipeline stage", "--pipeline-parallel-size"),
        (parallel.data_parallel_size > 1, "without data parallelism", "--data-parallel-size"),
        (vllm_config.kv_transfer_config is not None, "that keeps its pages to itself", "--kv-transfer-config"),
        (bool(vllm_config.cache_config.kv_offloading_size), "that keeps its pages to itself", "--kv-offloading-size"),
    )
    for bad, what, flag in checks:
        if bad:
            return Problem(f"constants are fitted only by a server {what}", once.format(flag))
    return None


def calibrated_codecs(options: Options) -> list[str]:
    settings = options.settings
    halves = (("keys", settings.keys), ("values", settings.values))
    return [f"{half}={codec.name}" for half, codec in halves if codec.calibrated]


def _identity(vllm_config: VllmConfig) -> str | None:
    """What keys depend on: configuration and weights, as far as files tell; None where they are not files."""
    model = vllm_config.model_config
    folder = weights_folder(model.model, model.revision)
    if folder is None or vllm_config.load_config.load_format == "dummy":
        return None
    files = weight_files(folder)
    # not under which name: a copy in another folder is the same model
    *meaning, config = model_meaning(model)[2:]
    config = {name: value for name, value in config.items() if name not in WRITTEN_ON_LOADING}
    return digest([[*meaning, config], [_sample(file) for file in files]]) if files else None


def _sample(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(SAMPLE)
        opened.seek(max(0, size - SAMPLE))
        return hashlib.sha256(first + opened.read(SAMPLE)).hexdigest() + f" {size}"


def _folder() -> Path | None:
    """Created by whoever writes. None for a user without a home who has named no other folder."""
    folder = named_folder() or user_folder()
    return None if folder is None else folder / "calibration"


# -- reading and writing ---------------------------------------------------------------------------------------------
def _checked(path: Path, belongs: Mapping[str, str]) -> str:
    """The digest in the file, whose tensors are not read. ValueError, with a sentence, unless it is of this model."""
    metadata = _metadata(path)
    differ = {
        "version": "another version",
        "codecs": "other codecs",
        "model": "another model",
        "layers": "other layers",
    }
    for name, what in differ.items():
        if name in belongs and metadata.get(name) != belongs[name]:
            raise ValueError(f"the calibration {path} is of {what}; {_instead(path)}")
    return metadata["digest"]


def _metadata(path: Path) -> Mapping[str, str]:
    return _content(path, False)[0]


def _content(path: Path, tensors: bool = True) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    """Metadata and, if they are wanted, tensors, all from one file: another server may put a new one in its place."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    if not path.is_file():
        raise ValueError(
            f"there is no calibration {path}; leave the option 'calibration' out, and one is made at start"
        )
    try:
        if tensors:
            written = path.read_bytes()  # at once: safe_open opens a file a second time for its tensors
            content = load(written)
            found = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")]).get("__metadata__", {})
        else:
            with safe_open(path, "pt") as file:
                found, content = file.metadata() or {}, {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the calibration {path} can't be read ({error}); {_instead(path)}") from None
    if "digest" not in found:
        raise ValueError(f"{path} is not a calibration; {_instead(path)}")
    return dict(found), content


def _instead(path: Path) -> str:
    named = path.parent != _folder()
    return f"{'leave the option out' if named else 'delete it'}, and the server will create a new one"


def read(path: Path) -> tuple[dict[int, Constants], str]:
    """The constants, and their digest. ValueError if they are not those that were written."""
    metadata, tensors = _content(path)
    halves: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        half, _, layer = name.partition(".")
        halves.setdefault(int(layer), {})[half] = tensor
    constants = {layer: Constants(x.get("keys"), x.get("values")) for layer, x in sorted(halves.items())}
    if digest_of(constants) != metadata["digest"]:
        raise ValueError(f"the calibration {path} is damaged; {_instead(path)}")
    return constants, metadata["digest"]


def write(path: Path, constants: ByLayer, belongs: Mapping[str, str]) -> None:
    """Under a temporary name first: no process sees half a file. OSError where that is impossible."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    content = save(_tensors(constants), {**belongs, "digest": digest_of(constants)})
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="tmp-", delete=False) as file:
        temporary = Path(file.name)
    try:
        # not by save_file, whose error on a full disk is no OSError
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _tensors(constants: ByLayer) -> dict[str, torch.Tensor]:
    halves = ((layer, half, getattr(of, half)) for layer, of in constants.items() for half in ("keys", "values"))
    return {f"{half}.{layer}": x.contiguous().cpu() for layer, half, x in halves if x is not None}


def digest_of(constants: ByLayer) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(_tensors(constants).items()):
        total.update(json.dumps([name, list(tensor.shape)]).encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:DIGITS]
