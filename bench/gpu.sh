#!/usr/bin/env bash
# All that needs a GPU, in one run of less than 9 minutes: build, kernel tests, compute-sanitizer on the CUDA kernels,
# then the table of decode times.
#
#   bash bench/gpu.sh                 needs python3 with torch >= 2.11, Triton >= 3.6, apache-tvm-ffi and numpy, nvcc,
#                                     and a GPU; no vLLM
#   bash bench/gpu.sh --dry-run       the same script on tiny shapes without a GPU: Triton's interpreter, and the CUDA
#                                     kernels emulated on the CPU
#
# $PYTHON chooses the interpreter. What is not there (nvcc, compute-sanitizer) is named and left out; what fails makes the
# exit status 1. No GPU has run this yet.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1

case "${1:-}" in
-h | --help)
  sed -n '2,12s/^# \{0,1\}//p' "$0"
  exit 0
  ;;
"" | --dry-run) ;;
*)
  echo "bench/gpu.sh: unknown option $1 (there are --dry-run and --help)" >&2
  exit 2
  ;;
esac
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
# step NAME SECONDS COMMAND...
step() {
  echo "== $1"
  timeout "$2" "${@:3}" || { status=1; echo "FAILED: $1"; }
}

cuda=1
if ! timeout 90 "$PYTHON" -m vllm_kvq.kernels.build_cuda; then
  echo "LEFT OUT: everything of the CUDA kernels"
  cuda=0
  status=1
fi
step "Triton kernels" 80 "$PYTHON" tests/gpu/test_gpu_decode.py
step "a layer's step" 60 "$PYTHON" tests/gpu/test_gpu_step.py
if ((cuda)); then
  step "CUDA kernels" 40 "$PYTHON" tests/gpu/test_gpu_qjl.py
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      step "compute-sanitizer $tool" 45 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool "$tool" --kernel-name kns=kvq --error-exitcode 1 \
        "$PYTHON" tests/gpu/test_gpu_qjl.py --quick
    done
  else
    echo "LEFT OUT: compute-sanitizer (not on the path)"
  fi
fi
step "decode times" 160 "$PYTHON" -m vllm_kvq.bench.gpu --seconds 130
exit "$status"
