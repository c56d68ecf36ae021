#!/usr/bin/env bash
# Runs in the folder that `make gpu-bundle` made, on a machine with a GPU and torch for Python 3.12; no network.
#
#   bash tools/gpu_verify.sh [OUT [options of the benchmark]]
#
# The GPU's tests run in JOBS processes, by default one for each two cores: much of their time is references on the CPU.
# Each keeps some gigabytes of the GPU's memory. Those that want the GPU to themselves follow.
# Leaves the record, the tests' results and the benchmark in OUT (by default out/ in the bundle). The exit code is 1
# when a test or a benchmarked result failed; the record is written all the same and says so.
set -uo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "${1:-$bundle/out}"
out=$(cd "${1:-$bundle/out}" && pwd)
shift || true
[ $# -gt 0 ] || set -- --suite h200
python=${PYTHON:-python3}
failed=0

cd "$bundle" || exit 1
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install -q --no-index --no-deps --target "$site" wheels/*.whl || exit 1
export PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

run_tests() {  # NAME PYTEST-OPTIONS..
  local name=$1
  shift
  : > "$out/tests-$name.xml"  # which says that it was started
  "$python" -m pytest -q -p no:cacheprovider --junitxml="$out/tests-$name.xml" "$@" || failed=1
}
jobs=${JOBS:-$((($(nproc) + 1) / 2))}
OMP_NUM_THREADS=2 run_tests gpu -m "gpu and not alone" --require-gpu -n "$jobs"
run_tests alone -m "gpu and alone" --require-gpu
run_tests cpu -m "not gpu"

commit=$("$python" -c 'import json; print(json.load(open("bundle.json"))["commit"])')
# From inside OUT, so that the command in the record names no folder of this machine.
(cd "$out" && "$python" -m epiloq.bench --commit "$commit" --json benchmark.json "$@") || failed=1
"$python" tools/gpu_record.py --collect "$out" || failed=1
exit "$failed"
