#!/usr/bin/env bash
# On a machine with a CUDA device: the tests that need one, then the benchmarks on it; the table comes last.
# Needs torch, DALI, pytest and what setup.cfg installs; reaches no network.
#
#   benchmarks/gpu.sh [OUT]      results in OUT (gpu_out)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_out}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "torch sees no CUDA device" >&2; exit 2; }
"$python" -m pytest -m gpu -p no:cacheprovider tests/codec/test_gpu.py tests/reading/test_batch_gpu.py tests/dali/test_gpu.py tests/writing/test_gpu.py \
    2>&1 | tee "$out/tests.txt" | tail -n 40
status=${PIPESTATUS[0]}
"$python" -m benchmarks --workload diffusion --scenario dali_gpu --scenario loader_gpu --no-peers --out "$out" || status=$?
exit "$status"
