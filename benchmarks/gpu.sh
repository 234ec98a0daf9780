#!/usr/bin/env bash
# On a machine with a CUDA device: the tests that need one, then the benchmarks on it; the table comes last.
# Needs torch, DALI, pytest and what setup.cfg installs; reaches no network.
#
#   benchmarks/gpu.sh [--dry] [OUT]      results in OUT (gpu_out)
#
# --dry needs no CUDA device: the tests are collected and skipped, and a few batches of each benchmark run on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=()
if [ "${1:-}" = --dry ]; then
    dry=(--dry)
    shift
    export CUDA_VISIBLE_DEVICES=
fi
out=${1:-gpu_out}
python=${PYTHON:-python3}
mkdir -p "$out"
if [ ${#dry[@]} = 0 ]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "torch sees no CUDA device" >&2; exit 2; }
fi
mapfile -t tests < <(grep -rlE 'pytest\.mark\.gpu|= GPU$' tests --include='test_*.py' | sort)
"$python" -m pytest -m gpu -p no:cacheprovider -rs "${tests[@]}" 2>&1 | tee "$out/tests.txt" | tail -n 80
status=${PIPESTATUS[0]}
"$python" -m benchmarks --workload diffusion --scenario dali_gpu --scenario loader_gpu --no-peers "${dry[@]}" --out "$out" || status=$?
exit "$status"
