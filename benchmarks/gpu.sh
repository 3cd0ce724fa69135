#!/usr/bin/env bash
# Runs gpu.py where Bifolio is not installed: links give the folder of kernels the name that it is imported by.
#   benchmarks/gpu.sh [options of gpu.py]    results go to $OUT, or to ./gpu-results
# MINUTES (8) is the time for everything, PYTHON (python3) what runs it.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
results=${OUT:-gpu-results}
names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
mkdir "$names/bifolio"
ln -s "$repository/kernels" "$names/bifolio/kernels"
export PYTHONPATH=$names${PYTHONPATH:+:$PYTHONPATH}

resume=()
for _ in {1..20}; do
  status=0
  "${PYTHON:-python3}" -P "$repository/benchmarks/gpu.py" --out "$results" --minutes "${MINUTES:-8}" "${resume[@]}" "$@" || status=$?
  resume=(--resume)
  case $status in
    75 | 134 | 135 | 136 | 139) ;; # a row took the process with it: go on behind that row
    *) exit "$status" ;;
  esac
done
exit "$status"
