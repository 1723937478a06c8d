#!/usr/bin/env bash
# All that needs a GPU, in one or two runs of 9 minutes: the first decode times, build, kernel tests, the table of decode
# times, then, in the time that is left, compute-sanitizer on the CUDA kernels.
#
# A GPU may be lent for minutes only. Every number goes to docs/results/gpu-DEVICE.csv as soon as it is measured, with a
# page and, where there is matplotlib, a figure, and every test that passed is noted in .gpu-passed: the next run resumes
# and repeats nothing. `rm -r .gpu-passed docs/results/gpu-DEVICE.csv` starts over. $RESULTS and $PASSED are other folders.
#
#   bash bench/gpu.sh [PART...]       needs python3 with torch >= 2.11, Triton >= 3.6, apache-tvm-ffi and numpy, nvcc,
#                                     and a GPU; no vLLM, whose FlashAttention 3 is measured, too, where it is. A PART is
#                                     tests, times or sanitizer; all of them unless some are named
#   bash bench/gpu.sh --dry-run       the same script on tiny shapes without a GPU: Triton's interpreter, and the CUDA
#                                     kernels emulated on the CPU
#
# $PYTHON chooses the interpreter. What is not there (nvcc, compute-sanitizer) is named and left out; what fails makes the
# exit status 1.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1

case "${1:-}" in
-h | --help)
  sed -n '2,17s/^# \{0,1\}//p' "$0"
  exit 0
  ;;
"" | --dry-run | tests | times | sanitizer) ;;
*)
  echo "bench/gpu.sh: unknown option $1 (there are tests, times, sanitizer, --dry-run and --help)" >&2
  exit 2
  ;;
esac
parts=" ${*:-tests times sanitizer} "
wanted() { [[ "$parts" == *" $1 "* ]]; }
if ! "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'; then
  echo "bench/gpu.sh: $PYTHON has no torch or no Triton" >&2
  exit 1
fi
RESULTS="${RESULTS:-docs/results}"
PASSED="${PASSED:-.gpu-passed}"
mkdir -p "$RESULTS" "$PASSED"
status=0
# step NAME SECONDS COMMAND...
step() {
  echo "== $1 (at $SECONDS s)"
  timeout "$2" "${@:3}" || { status=1; echo "FAILED: $1"; return 1; }
}
# once NAME SECONDS COMMAND...: not again after it has passed
once() {
  local mark="$PASSED/${1// /-}"
  if [[ -e "$mark" ]]; then
    echo "== $1: passed before"
  else
    step "$@" && touch "$mark"
  fi
}

# figure: of all decode times that were measured, on this machine and before; other files have other heads
figure() {
  local measured
  mapfile -t measured < <(grep -slx 'torch,what,batch,context,seconds,read' "$RESULTS"/gpu-*.csv)
  if ((!${#measured[@]})); then
    echo "LEFT OUT: the figure (nothing was measured)"
  elif "$PYTHON" -c 'import matplotlib' 2>/dev/null; then
    step "figure" 60 "$PYTHON" -m vllm_kvq bench plot "${measured[@]}"
  else
    echo "LEFT OUT: the figure (no matplotlib); where there is: python3 -m vllm_kvq bench plot ${measured[*]}"
  fi
}

if [[ "${1:-}" == "--dry-run" ]]; then
  step "first decode times" 300 "$PYTHON" -m vllm_kvq bench gpu --dry-run --out "$RESULTS" --formats squat2
  once "Triton kernels" 300 "$PYTHON" tests/gpu/test_gpu_attend.py --dry-run
  once "a layer's step" 300 "$PYTHON" tests/gpu/test_gpu_step.py --dry-run
  once "CUDA kernels" 300 "$PYTHON" tests/gpu/test_gpu_qjl.py --dry-run
  step "decode times" 300 "$PYTHON" -m vllm_kvq bench gpu --dry-run --out "$RESULTS"
  figure
  exit "$status"
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "bench/gpu.sh: no CUDA device; bash bench/gpu.sh --dry-run tries the script without one" >&2
  exit 1
fi

wanted times &&
  step "first decode times" 150 "$PYTHON" -m vllm_kvq bench gpu --out "$RESULTS" --formats squat2 --context 65536 \
    --batch 1,8 --seconds 120
FORMATS="$("$PYTHON" -c 'from vllm_kvq.bench.gpu.decode import formats; print(*formats(), sep=",")')" || exit 1
# nvcc takes a minute, and so do Triton's kernels of the bench, one process per format
timeout 120 "$PYTHON" -m vllm_kvq.kernels.gpu.build &
build=$!
compiling=()
for format in ${FORMATS//,/ }; do
  wanted times && [[ "$format" != qjl3 ]] || continue
  timeout 110 "$PYTHON" -m vllm_kvq bench gpu --compile --formats "$format" &
  compiling+=("$!")
done
without=()
if ! wait "$build"; then
  echo "LEFT OUT: everything of the CUDA kernels"
  status=1
  without=(--without-cuda)
  FORMATS="${FORMATS/qjl3,/}"
fi
for process in "${compiling[@]}"; do
  wait "$process" || { status=1; echo "FAILED: compiling a format's kernels"; }
done
echo "== compiled (at $SECONDS s)"
if wanted tests; then
  once "Triton kernels" 200 "$PYTHON" tests/gpu/test_gpu_attend.py
  once "a layer's step" 200 "$PYTHON" tests/gpu/test_gpu_step.py "${without[@]}"
  ((${#without[@]})) || once "CUDA kernels" 40 "$PYTHON" tests/gpu/test_gpu_qjl.py
fi
if wanted times; then
  step "decode times" 170 "$PYTHON" -m vllm_kvq bench gpu --out "$RESULTS" --seconds 130 --formats "$FORMATS"
  figure
fi
if ! wanted sanitizer || ((${#without[@]})); then
  :
elif ! command -v compute-sanitizer >/dev/null; then
  echo "LEFT OUT: compute-sanitizer (not on the path)"
else
  for tool in memcheck racecheck; do
    left=$((525 - SECONDS))
    if ((left < 20)); then
      echo "LEFT OUT: compute-sanitizer $tool (no time)"
      continue
    fi
    once "compute-sanitizer $tool" "$left" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$tool" --kernel-name kns=kvq --error-exitcode 1 \
      "$PYTHON" tests/gpu/test_gpu_qjl.py --quick
  done
fi
exit "$status"
