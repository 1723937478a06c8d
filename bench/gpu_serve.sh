#!/usr/bin/env bash
# `vllm serve` with low-bit caches on a GPU, end to end: installs vLLM beside this checkout, starts a server per format
# and streams one answer from it (python -m proof demo: it fails unless the server says that its cache is packed). Then,
# with a MODEL, `vllm bench serve` on each cache, fp8's too, all of the same bytes: docs/results/gpu-serve/CACHE.json. What
# is there is not measured again. vLLM's V2 model runner serves, as it does on CUDA unless it is told otherwise.
#
#   bash bench/gpu_serve.sh [--dry-run] [FORMAT...]       default: auto squat2 kitty2 qjl3 polar4 innerq2
#
#   PYTHON=python3       makes the environment (.venv-gpu), which installs vLLM from the package index
#   WHEELS=DIR           install from this folder of wheels instead, without network
#   SITE=DIR             no environment at all: $PYTHON with this folder (an unpacked vLLM and what it needs) on its path
#   MODEL=PATH, PORT=8000, EACH=240 (seconds that a format may take; a large model needs more)
#   CACHE_BYTES=8589934592, INPUT=16384, OUTPUT=256, PROMPTS=64: the cache, and the requests of vllm bench serve
#   RESULTS=docs/results/gpu-serve
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
    sed -n '2,17s/^# \{0,1\}//p' "$0"
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
((${#formats[@]})) || formats=(auto squat2 kitty2 qjl3 polar4 innerq2)

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
for format in "${formats[@]}"; do
  echo "== vllm serve --kv-cache-dtype $format"
  run timeout "${EACH:-240}" "$PYTHON" -m proof demo --once --format "$format" --port "$PORT" ${MODEL:+--model "$MODEL"} ||
    { status=1; echo "FAILED: $format"; }
done
if [[ -z "${MODEL:-}" ]]; then
  echo "LEFT OUT: vllm bench serve (MODEL names no model)"
  exit "$status"
fi

# load CACHE: a server with that cache, vllm bench serve on it, and its end
load() {
  local server ready=0 waited
  local vllm=("$PYTHON" -m vllm.entrypoints.cli.main)
  run "${vllm[@]}" serve "$MODEL" --port "$PORT" --kv-cache-dtype "$1" --kv-cache-memory-bytes "$CACHE_BYTES" &
  server=$!
  for ((waited = 0; waited < ${EACH:-240}; waited++)); do
    ((dry)) || curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health" && ready=1 && break
    kill -0 "$server" 2>/dev/null || break
    sleep 1
  done
  ((dry)) && wait "$server"
  ((ready)) && run timeout "${EACH:-240}" "${vllm[@]}" bench serve --model "$MODEL" --port "$PORT" \
    --dataset-name random --random-input-len "$INPUT" --random-output-len "$OUTPUT" --num-prompts "$PROMPTS" \
    --ignore-eos --save-result --result-dir "$RESULTS" --result-filename "$1.json.part" &&
    run mv "$RESULTS/$1.json.part" "$RESULTS/$1.json"
  local failed=$?
  ((dry)) || { kill "$server" && wait "$server"; } 2>/dev/null
  return "$failed"
}

CACHE_BYTES="${CACHE_BYTES:-8589934592}" INPUT="${INPUT:-16384}" OUTPUT="${OUTPUT:-256}" PROMPTS="${PROMPTS:-64}"
RESULTS="${RESULTS:-docs/results/gpu-serve}"
caches=(auto fp8)
for format in "${formats[@]}"; do
  [[ "$format" == auto ]] || caches+=("$format")
done
run mkdir -p "$RESULTS"
for cache in "${caches[@]}"; do
  if [[ -e "$RESULTS/$cache.json" ]]; then
    echo "== vllm bench serve, $cache: measured before"
    continue
  fi
  echo "== vllm bench serve, $cache"
  load "$cache" || { status=1; echo "FAILED: vllm bench serve, $cache"; }
done
exit "$status"
