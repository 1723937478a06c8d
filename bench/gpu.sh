#!/usr/bin/env bash
# All that needs a GPU, in one run of less than 9 minutes: kernel tests, then the table of decode times.
#
#   bash bench/gpu.sh                 needs python3 with torch >= 2.11 and Triton >= 3.6, and a GPU; no vLLM
#   bash bench/gpu.sh --dry-run       the same script on tiny shapes under Triton's interpreter, without a GPU
#
# $PYTHON chooses the interpreter. No GPU has run this yet.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 0
fi
if ! "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'; then
  echo "bench/gpu.sh: $PYTHON has no torch or no Triton" >&2
  exit 1
fi
if [[ "${1:-}" == "--dry-run" ]]; then
  exec "$PYTHON" -m vllm_kvq.bench.gpu --dry-run
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "bench/gpu.sh: no CUDA device; bash bench/gpu.sh --dry-run tries the script without one" >&2
  exit 1
fi

status=0
echo "== tests"
timeout 200 "$PYTHON" tests/gpu/test_gpu_decode.py || { status=1; echo "TESTS FAILED"; }
echo "== decode times"
timeout 320 "$PYTHON" -m vllm_kvq.bench.gpu --seconds 270 || { status=1; echo "BENCH FAILED"; }
exit "$status"
