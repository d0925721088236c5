#!/usr/bin/env bash
# Packs a wheel against the torch of an environment, repairs it (torch's libraries stay torch's, libtexvlm.so stays where C++ programs look
# for it), and proves it where there is nothing but that torch: it installs, it runs, and beside another torch it says so in one line.
#   tests/wheel.sh .venv/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath -s "$1")
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
say() { printf '==> %s\n' "$*"; }

say "compiling what changed, and packing (whole log: build/wheel.log)"
mkdir -p build dist
rm -rf build/lib.* build/bdist.*  # else modules that are gone would be packed
TEXVLM_WHEEL=1 "$python" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -w "$room/plain" . > build/wheel.log 2>&1 \
  || { tail -n 25 build/wheel.log; exit 1; }

PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libtexvlm*' \
  --exclude 'libcudart*' -w "$room/repaired" "$room"/plain/*.whl >> build/wheel.log 2>&1 || { tail -n 25 build/wheel.log; exit 1; }
wheel=$(echo "$room"/repaired/*.whl)

say "installing it beside nothing but torch"
"$python" -m venv "$room/bare"
bare=$room/bare/bin/python
site=$("$bare" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' > "$site/torch-there.pth"
"$bare" -m pip uninstall -qq -y setuptools  # its own, where it has one, is too old for torch
"$bare" -m pip install -qq --disable-pip-version-check --no-index "$wheel"
cd "$room"  # where no ./texvlm hides it
unset PYTHONPATH
"$bare" - << 'PYTHON'
import sys, texvlm, torch
from pathlib import Path

assert Path(texvlm.__file__).is_relative_to(sys.prefix), texvlm.__file__
picture = torch.rand(1, 3, 64, 64, requires_grad=True)
texvlm.Texture(picture).data.sum().backward()
print(f"    imports {texvlm.__file__}: {int(texvlm.select(picture.detach(), 4).count)} of 16 cells, gradients too")
PYTHON
sed -i 's/^Requires-Dist: torch==.*/Requires-Dist: torch==2.9.*/' "$site"/texvlm-*.dist-info/METADATA
said=$("$bare" -c 'import texvlm' 2>&1 | tail -n 1) || true
[[ $said == *"this wheel of it is for torch 2.9, and you run "* ]] || { echo "beside another torch it says: $said"; exit 1; }
say "beside another torch: $said"
cd - > /dev/null
cp "$wheel" dist/
say "dist/$(basename "$wheel"), $(du -h "$wheel" | cut -f 1)"
