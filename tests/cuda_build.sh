#!/usr/bin/env bash
# The flavour that a GPU user gets: builds texvlm beside a CUDA build of torch (linked to the CUDA side of torch), imports it and runs on
# it the tests whose outcome can differ there, in a copy of the checkout with an environment of its own, thrown away afterwards. No GPU
# needed; about 5 GB of disk. Without that torch (no network, no space) it says so in one line and succeeds; a build or a test that
# fails, fails.
#
# Not all tests: the formulas are the same sources, compiled by the same compiler, and no header of torch is under them; `make test` has
# run them. What another torch, with CUDA inside, can change is what touches it: every op's registration, dispatch, fakes and autograd
# (the contract, a case of each op and set of gradients), export, autocast, forks and workers (test_torch), streams and the cache of
# textures, the C++ example, the command line, and the processors of Qwen-VL, which want torchvision.
# The kernels' objects are those of `make kernels`, which know nothing of torch either.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
torch=${CUDA_TORCH:-torch==2.11.0}
copy=$(mktemp -d) || exit 1
trap 'rm -rf "$copy"' EXIT

not_done() { echo "test-cuda-build: $1: nothing tested"; exit 0; }

command -v nvcc > /dev/null || not_done "no nvcc on PATH"
[ "$(df --output=avail -k "$copy" | tail -n 1)" -gt $((8 << 20)) ] || not_done "less than 8 GiB of disk are free"
git ls-files -z -co --exclude-standard | tar --null --ignore-failed-read -T - -cf - 2> /dev/null | tar -xf - -C "$copy" || exit 1
export TEXVLM_CUDA_ARCHS=${TEXVLM_CUDA_ARCHS:-75 90}
make kernels ARCHS="$TEXVLM_CUDA_ARCHS" || exit 1
TEXVLM_KERNELS=$PWD/build/cuda-$(echo "$TEXVLM_CUDA_ARCHS" | tr -d . | tr -s ';, ' '+')
export TEXVLM_KERNELS
cd "$copy" || exit 1
verb() { make ISOLATED=1 VENV=.venv TORCH="$torch" "$@"; }
verb .venv/.torch || not_done "$torch could not be installed"
.venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || not_done "$torch is a build without CUDA here"

# In a hurry, and with one copy of each loop: the formulas are not what is tried.
CXXFLAGS="${CXXFLAGS:-} -O0 -DTEXVLM_NO_ISA_DISPATCH" verb build || exit 1
.venv/bin/python - << 'PYTHON' || exit 1
import subprocess, sys, texvlm
from pathlib import Path

info = texvlm.build_info()
needed = subprocess.run(["readelf", "-d", Path(texvlm.__file__).with_name("lib") / "libtexvlm.so"], capture_output=True, text=True).stdout
print(f"built beside torch {info['torch']} with CUDA {info['cuda_version']} for {info['cuda_archs']}")
# The streams are c10_cuda's; torch_cuda is given to the linker too, which leaves it out while nothing of it is named.
sys.exit(0 if info["cuda"] and "libc10_cuda" in needed else "not linked to libc10_cuda")
PYTHON
# The processors of transformers want torchvision, whose builds fit CUDA builds of torch only.
.venv/bin/python -m pip install -qq --no-input --no-deps "${CUDA_TORCHVISION:-torchvision==0.26.0}" || echo "no torchvision could be installed: the real processors are not tried"
verb test ALL_TESTS_NEED= ARGS="--brief -k 'not gradcheck and not second_derivatives and not every_loop and not thread_count' \
  $(echo tests/test_{contract,torch,texture_cache,cpp,cli,arguments,qwen_processor}.py)"
