#!/usr/bin/env bash
# `vllm serve` with low-bit caches on a GPU, end to end: installs vLLM beside this checkout, starts a server per format
# and streams one answer from it (python -m proof demo: it fails unless the server says that its cache is packed).
#
#   bash bench/gpu_serve.sh [--dry-run] [FORMAT...]       default: auto squat2 qjl3 polar4 innerq2
#
#   PYTHON=python3       makes the environment (.venv-gpu), which installs vLLM from the package index
#   WHEELS=DIR           install from this folder of wheels instead, without network
#   SITE=DIR             no environment at all: $PYTHON with this folder (an unpacked vLLM and what it needs) on its path
#   MODEL=PATH, PORT=8000, EACH=240 (seconds that a format may take; a large model needs more)
#
# --dry-run prints the commands. Whether a GPU machine allows an installation is its own matter: where it doesn't, use
# WHEELS or SITE.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
PORT="${PORT:-8000}"
dry=0
formats=()
for argument in "$@"; do
  case "$argument" in
  -h | --help)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  --dry-run) dry=1 ;;
  -*)
    echo "bench/gpu_serve.sh: unknown option $argument (there are --dry-run and --help)" >&2
    exit 2
    ;;
  *) formats+=("$argument") ;;
  esac
done
((${#formats[@]})) || formats=(auto squat2 qjl3 polar4 innerq2)

run() {
  if ((dry)); then
    echo "+ $*"
  else
    "$@"
  fi
}

if ((!dry)) && ! command -v nvidia-smi >/dev/null; then
  echo "bench/gpu_serve.sh: no nvidia-smi, so no GPU; --dry-run prints what would be done" >&2
  exit 1
fi
if [[ -n "${SITE:-}" ]]; then
  if ((!dry)) && [[ ! -d "$SITE/vllm" ]]; then
    echo "bench/gpu_serve.sh: there is no vllm in SITE=$SITE" >&2
    exit 1
  fi
  # the plugin is found by its entry point, so it must be installed, not only importable
  run "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --target .gpu-plugin --upgrade . || exit 1
  export PYTHONPATH="$PWD/.gpu-plugin:$SITE${PYTHONPATH:+:$PYTHONPATH}"
else
  index=()
  [[ -n "${WHEELS:-}" ]] && index=(--no-index --find-links "$WHEELS")
  [[ -d .venv-gpu ]] || run "$PYTHON" -m venv .venv-gpu || exit 1
  run .venv-gpu/bin/python -m pip install --quiet "${index[@]}" 'vllm>=0.32,<0.34' 'setuptools>=77,<81' wheel || exit 1
  run .venv-gpu/bin/python -m pip install --quiet "${index[@]}" --no-build-isolation --editable '.[gpu]' || exit 1
  PYTHON=.venv-gpu/bin/python
fi

status=0
for format in "${formats[@]}"; do
  echo "== vllm serve --kv-cache-dtype $format"
  run timeout "${EACH:-240}" "$PYTHON" -m proof demo --once --format "$format" --port "$PORT" ${MODEL:+--model "$MODEL"} ||
    { status=1; echo "FAILED: $format"; }
done
exit "$status"
