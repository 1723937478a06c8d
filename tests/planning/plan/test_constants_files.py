"""What disks and users' folders do to a file of constants: none is read half-written, and none of it stops a start."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import WarmContext

from vllm_kvq.formats.constants import Constants, Moments
from vllm_kvq.integration.plan import calibration
from vllm_kvq.integration.plan.calibration import Source, read, write
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.integration.plan.plan import plan
from vllm_kvq.integration.worker.calibration import fitting
from vllm_kvq.problem import Refused

BELONGS = {"version": "1"}
TIMES = 30


def constants(seed: int = 0) -> dict[int, Constants]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: Constants(torch.randn(2, 130, 64, generator=generator), None) for layer in range(3)}


@contextmanager
def files_of_at_most(bytes_: int) -> Iterator[None]:
    """The kernel refuses what lies beyond, as it does on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.parametrize("room", [0, 4096, 150_000], ids=lambda n: f"{n} bytes")
def test_a_full_disk_is_an_error_of_the_system(room: int, tmp_path: Path) -> None:
    """The file that was there stays as it was, and nothing else is left."""
    path = tmp_path / "constants.safetensors"
    write(path, constants(), BELONGS)
    before = path.read_bytes()
    with files_of_at_most(room), pytest.raises(OSError, match="File too large"):
        write(path, constants(1), BELONGS)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(fitting.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def test_a_full_disk_stops_no_start(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "constants.safetensors"
    with files_of_at_most(4096):
        fitting._keep(Source(path, BELONGS, None), constants())
    assert warnings == [f"kvq: the constants can't be kept in {path} (File too large), so every start fits them again"]
    assert not path.exists()


def test_a_folder_that_takes_nothing_stops_no_start(warnings: list[str]) -> None:
    """Not even root may write into the kernel's own folder."""
    fitting._keep(Source(Path("/proc/kvq/constants.safetensors"), BELONGS, None), constants())
    assert len(warnings) == 1
    assert "can't be kept in /proc/kvq" in warnings[0]


def test_a_user_without_a_home(
    configured: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Has nowhere to keep constants, which each start then fits; a folder that is named is used."""
    for name in ("XDG_CACHE_HOME", "VLLM_KVQ_CACHE"):
        monkeypatch.delenv(name, raising=False)
    config = configured(kv_cache_dtype="klt3")
    layers = sorted(plan(config).layers.packed_layers)

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    source = Source.of(config, Options.of(config), layers)
    assert source is not None
    assert (source.path, source.found) == (None, None)
    fitting._keep(source, constants())
    assert warnings == ["kvq: there is no place for the constants, so every start fits them again"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Source.of(config, Options.of(config), layers)
    assert source is not None
    assert source.path is not None
    assert source.path.is_relative_to(tmp_path)


# -- whose they are ---------------------------------------------------------------------------------------------------
def source_of(config: Any) -> Source:
    found = Source.of(config, Options.of(config), sorted(plan(config).layers.packed_layers))
    assert found is not None
    return found


@pytest.mark.parametrize("what", ["version", "codecs", "layers", "model"])
def test_a_file_of_others_is_refused(what: str, configured: Callable[..., Any], tmp_path: Path) -> None:
    """Each of the four by itself: a file may be of this model, and yet of other layers."""
    file = tmp_path / "named.safetensors"
    belongs = source_of(configured(kv_cache_dtype="klt3")).belongs
    named = {"kv_cache_dtype": "klt3", "additional_config": {"kvq": {"calibration": str(file)}}}
    write(file, constants(), belongs)
    assert source_of(configured(**named)).found is not None
    write(file, constants(), {**belongs, what: "another"})
    with pytest.raises(Refused, match=rf"the calibration \S+ is of \w+ {what}; leave the option out"):
        configured(**named)


def test_random_weights_leave_no_file(configured: Callable[..., Any]) -> None:
    """A start with --load-format dummy would fit constants to them, which later starts of the model would read."""
    assert source_of(configured(kv_cache_dtype="klt3")).path is not None
    source = source_of(configured(kv_cache_dtype="klt3", load_format="dummy"))
    assert (source.path, source.found) == (None, None)


@pytest.mark.parametrize("place", [0, -1], ids=["begin", "end"])
def test_weights_are_told_apart_at_both_ends(place: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content := bytes(3 * calibration.SAMPLE))
    before = calibration._sample(file)
    changed = bytearray(content)
    changed[place] ^= 1
    file.write_bytes(changed)
    assert calibration._sample(file) != before


def test_keys_that_are_not_finite_fit_nothing() -> None:
    """In float16 they might not be finite. A file with NaN would pass for sound in all later starts."""
    x = torch.randn(8, 2, 16)
    assert fitting._on_host(Moments.of(x, x)).tokens.tolist() == [8, 8]
    for wrong in (Moments.of(x * torch.inf, x), Moments.of(x, x * torch.nan)):
        with pytest.raises(Refused, match="are not finite on the text to which constants are fitted"):
            fitting._on_host(wrong)


# -- several at once --------------------------------------------------------------------------------------------------
def written(path: str, seed: int) -> None:
    for _ in range(TIMES):
        write(Path(path), constants(seed), BELONGS)


def test_a_file_that_several_servers_write_is_always_one_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "constants.safetensors"
    write(path, constants(0), BELONGS)
    mine = {str(read(path)[1])}
    for seed in (1, 2):
        write(tmp_path / "other", constants(seed), BELONGS)
        mine.add(read(tmp_path / "other")[1])
    os.unlink(tmp_path / "other")
    with ProcessPoolExecutor(2, WarmContext()) as pool:
        running = [pool.submit(written, str(path), seed) for seed in (1, 2)]
        seen = set()
        while not all(future.done() for future in running):
            seen.add(read(path)[1])
        for future in running:
            future.result()
    assert len(mine) == 3
    assert seen <= mine
    assert [*tmp_path.iterdir()] == [path]


def test_metadata_and_tensors_are_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although another server puts its file in this one's place meanwhile: safetensors opens a file twice."""
    path, from_file = tmp_path / "constants.safetensors", torch.UntypedStorage.from_file
    write(path, constants(1), BELONGS)
    digest = read(path)[1]

    def replaced(*args: Any, **kwargs: Any) -> torch.UntypedStorage:
        write(path, constants(2), BELONGS)
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert read(path)[1] == digest
