# What is made here, and how: `make` lists it. Needs make and a Python. slow.mk has the suites of minutes; environments.mk installs everything
# else into environments of their own, such as .venv-dev, once and again after pyproject.toml or the C++ operators change.

include environments.mk
include slow.mk
-include js/rules.mk

# One process for each core, and so one thread in each for PyTorch and onnxruntime (tests/one_thread.py).
pytest = -m pytest --numprocesses auto --dist worksteal $(ARGS)
test test-all test-quick test-oldest test-newest test-builder: export OMP_NUM_THREADS = 1

dev := .venv-dev/bin/python
distributing := .venv-dist/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-quick test-others test-oldest test-newest test-builder lint format dist environments bench ranks memory guard profile soak fuzz steps gallery stories exports federated genai mutate docs site clean faults files disagreements plugins

# Of 24 lines with 80 columns: a target is described in at most 64 characters. tests/test_packaging.py checks both.
help:
	@echo "make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv-demo/installed  ## train a small network on digits from a .onnx file
	.venv-demo/bin/python examples/digits.py

test: .venv-dev/installed  ## run the tests, doctests, examples and README snippets
	$(dev) $(pytest) -m "not builder" $(if $(ARGS),,--sample)

# `make test` runs a sample of the tests with the most cases (tests/samples.py); `make test-all` runs all of their cases.
test-all: .venv-dev/installed
	$(dev) $(pytest) -m "not builder"
test-quick: .venv-dev/installed  ## run a sample of the tests, in under a minute
	$(dev) $(pytest) -m "not builder" --quick

# test-oldest: the lower bounds of pyproject.toml, on the oldest Python; test-newest: the newest Python; both without PyTorch.
# test-builder: `gradient="onnxruntime"`, on the training build of onnxruntime. Only files with a test of it are collected: collecting all
# takes longer than running these.
test-others: test-oldest test-newest test-builder  ## test the oldest and newest packages, and the builder

test-oldest: .venv-oldest/installed
	ONNXFIT_KERNELS=off ONNXFIT_TEST_WITHOUT=torch .venv-oldest/bin/python $(pytest) -m "not builder" --quick --ignore tests/kernels
test-newest: .venv-newest/installed
	ONNXFIT_TEST_WITHOUT=torch .venv-newest/bin/python $(pytest) -m "not builder" --quick
test-builder: .venv-training/installed
	.venv-training/bin/python $(pytest) -m builder $$(grep -rlE 'every_way|needs_builder|mark\.builder' tests --include='test_*.py')

lint: .venv-dev/installed  ## check with ruff and mypy --strict
	$(dev) -m ruff check .
	$(dev) -m ruff format --check .
	$(dev) -m mypy --strict onnxfit
format: .venv-dev/installed  ## format, and repair what ruff can repair
	$(dev) -m ruff check --fix .
	$(dev) -m ruff format .

# The wheel is built from the unpacked sdist, and tried where the checkout cannot be imported by accident; on other Pythons by
# `python3.14 scripts/try_wheel.py dist/*.whl`. PyPI takes no wheel for one Linux: auditwheel gives it the tag of the oldest systems
# that it works on, which are older if the wheel is built on an older one.
dist: .venv-dist/installed  ## build and try sdist and wheel
	rm -rf dist build/wheel
	$(distributing) scripts/build_dist.py build/wheel
	mkdir -p dist && mv build/wheel/*.tar.gz dist
	if test "$$(uname)" = Linux; then PATH="$(CURDIR)/.venv-dist/bin:$$PATH" $(distributing) -m auditwheel repair --wheel-dir dist build/wheel/*.whl; \
	else mv build/wheel/*.whl dist; fi
	$(distributing) -m twine check --strict dist/*
	$(distributing) scripts/try_wheel.py dist/*.whl

environments: dist  ## install the wheel beside each onnxruntime; make plugins
	$(distributing) scripts/try_environments.py dist/*.whl

# A run that was cut off goes on where it was; ARGS=--fresh measures everything anew, ARGS="--workloads mlp gru" a part of it, and
# ARGS=--write-docs writes docs/benchmarks.md.
bench: .venv-bench/installed  ## chart and table of onnxfit beside PyTorch (over 1 h)
	.venv-bench/bin/python benchmarks/suite $(ARGS)

# LoRA beside a frozen base of 1 GB, in onnxfit and PyTorch (10 min). Options as in benchmarks/memory.py: ARGS="--megabytes 2600 --contender onnxfit"
memory: .venv-dev/installed
	$(dev) benchmarks/memory.py $(ARGS)
guard: .venv-dev/installed  ## notice when four networks train slower than they did
	$(dev) benchmarks/suite/guard.py $(ARGS)

# Options: LOSS= OPTIMIZER= BACKEND= BATCH= ROWS=
profile: .venv-dev/installed  ## time the operators of a training step: MODEL=file.onnx
	@test -n "$(MODEL)" || { echo "Name a model: make profile MODEL=file.onnx [LOSS=mse] [BATCH=32]" >&2; exit 1; }
	@$(dev) scripts/profile_step.py "$(MODEL)" $(if $(LOSS),--loss $(LOSS)) $(if $(OPTIMIZER),--optimizer $(OPTIMIZER)) \
	  $(if $(BACKEND),--backend $(BACKEND)) $(if $(BATCH),--batch $(BATCH)) $(if $(ROWS),--rows $(ROWS))

docs: .venv-dev/installed  ## write the generated pages and pictures of the docs
	$(dev) -m onnxfit ops --markdown > docs/operators.md
	$(dev) scripts/architecture_pictures.py
	$(dev) scripts/page_pictures.py
	$(dev) scripts/notebooks.py
	PYTHONPATH=. $(dev) scripts/document_registries.py

# Warnings are errors: a link that leads nowhere fails.
site: .venv-site/installed  ## build the documentation site into build/site
	.venv-site/bin/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --doctree-dir build/doctrees docs build/site
	@echo "Open build/site/index.html"

clean:  ## remove everything made here, the environments too
	rm -rf .venv-* build dist onnxfit/kernels/operators.so runs checkpoints trained.onnx digits.onnx digits.png base.onnx served js/dist js/node_modules js/tests/folders
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
