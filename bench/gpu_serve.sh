#!/usr/bin/env bash
# `vllm serve` with low-bit caches on a GPU, end to end: installs vLLM next to this checkout, starts a server per format, all
# at once, and streams one answer from each (python -m proof demo: it fails unless the server says that its cache is
# packed). Then bench/gpu_serve.py times servers with each cache, vLLM's fp8 too, all of the same bytes. vLLM's V2 model
# runner serves, as it does on CUDA unless it is told otherwise.
#
#   bash bench/gpu_serve.sh [--dry-run] [FORMAT...]       default: auto klt3 squat2 kitty2 qjl3 polar4 innerq2
#
#   PYTHON=python3       makes the environment (.venv-gpu), which installs vLLM from the package index
#   WHEELS=DIR           install from this folder of wheels instead, without network
#   SITE=DIR             no environment at all: $PYTHON with this folder (an unpacked vLLM and what it needs) on its path; without
#                        flashinfer there, set VLLM_USE_FLASHINFER_SAMPLER=0
#   MODEL=PATH, PORT=8000 (and those after it), EACH=240: the seconds that a format may take; a large model needs more
#   CACHES=auto,fp8,klt3, CACHE_BYTES=8G, RESULTS=docs/results/gpu-serve.csv: what is timed, without MODEL with dummy
#                        weights of an 8B Llama
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
    sed -n '2,19s/^# \{0,1\}//p' "$0"
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
((${#formats[@]})) || formats=(auto klt3 squat2 kitty2 qjl3 polar4 innerq2)

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

export VLLM_USE_V2_MODEL_RUNNER=1
status=0
# as many servers as there are formats share the memory
share="$(awk "BEGIN {printf \"%.2f\", 0.9 / ${#formats[@]}}")"
demos=()
port="$PORT"
for format in "${formats[@]}"; do
  echo "== vllm serve --kv-cache-dtype $format"
  demo=("$PYTHON" -m proof demo --once --kv-cache-dtype "$format" --port "$((port++))" ${MODEL:+--model "$MODEL"})
  demo+=(-- --gpu-memory-utilization "$share" --kv-cache-memory-bytes 1G)
  run timeout "${EACH:-240}" "${demo[@]}" &
  demos+=("$!")
  ((dry)) && wait "$!"
done
for i in "${!demos[@]}"; do
  wait "${demos[$i]}" || { status=1; echo "FAILED: ${formats[$i]}"; }
done
run "$PYTHON" bench/gpu_serve.py --caches "${CACHES:-auto,fp8,klt3}" ${MODEL:+--model "$MODEL"} \
  --cache-bytes "${CACHE_BYTES:-8G}" --out "${RESULTS:-docs/results/gpu-serve.csv}" ||
  { status=1; echo "FAILED: times of servers"; }
exit "$status"
