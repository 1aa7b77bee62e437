#!/usr/bin/env bash
# Builds packattn for the GPU of this machine, proves it there and measures it. One command, under 9 minutes, no network:
#
#   benchmarks/device/run.sh             results in $OUT, or benchmarks/results/device-DATE
#   benchmarks/device/run.sh --dry-run   on a machine without a GPU: all of it but the work of the GPU
#
# It needs torch (2.10 or later, built for CUDA), nvcc, cmake and a C++20 compiler; pytest for the tests. PYTHON is the
# interpreter (default python3). Stages and their times: stages.py --help.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" -u "$here/stages.py" "$@"
