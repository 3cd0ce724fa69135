#!/usr/bin/env bash
# Runs gpu.py where Bifolio is not installed: links give its folders the names that they are imported by.
#   benchmarks/gpu.sh [options of gpu.py]    results go to $OUT, or to ./gpu-results
# MINUTES (8) is the time for everything, PYTHON (python3) what runs it. Kernels need PyTorch and Triton, engines also
# what gpu-packages.txt names; for a machine without a network WHEELS is a folder with those that it lacks.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
results=${OUT:-gpu-results}
names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
mkdir "$names/bifolio" "$names/wheels"
for folder in kernels protos kv_manager replicas cluster; do
  ln -s "$repository/$folder" "$names/bifolio/$folder"
done
if [[ -n ${WHEELS:-} ]]; then
  "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$names/wheels" "$WHEELS"/*.whl || echo "WHEELS could not be installed: rows of engines may be skipped" >&2
fi
export PYTHONPATH=$names:$names/wheels${PYTHONPATH:+:$PYTHONPATH}

resume=()
for _ in {1..20}; do
  status=0
  "${PYTHON:-python3}" -P "$repository/benchmarks/gpu.py" --out "$results" --minutes "${MINUTES:-8}" \
    --scratch "$names" "${resume[@]}" "$@" || status=$?
  resume=(--resume)
  case $status in
    75 | 134 | 135 | 136 | 137 | 139) ;; # a row took the process with it: go on behind that row
    *) exit "$status" ;;
  esac
done
exit "$status"
