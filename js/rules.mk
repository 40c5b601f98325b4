# Targets of the npm package, for the Makefile of the repository.

.PHONY: js web web-test js/package

js: .venv-dev/installed js/node_modules/installed  ## build, lint and test the npm package; make web shows it
	cd js && npm run build && npm run lint
	ONNXFIT_KERNELS=off OMP_NUM_THREADS=1 $(dev) js/tests/make_folders.py js/tests/folders
	cd js && npm test

# The file for `npm publish`, in dist/.
js/package: js
	$(dev) scripts/build_npm.py dist

# In Chromium, whose path is CHROMIUM=; WebGPU is computed in software.
web-test: js build/web/training
	cd js && PYTHON=$(abspath $(dev)) npm run test-browser

# Serve the page of examples/web on PORT=8000.
web: js/node_modules/installed build/web/training
	cd js && npm run build && node scripts/build_web.mjs ../build/web && node scripts/serve.mjs ../build/web $(PORT)

# The scripts of packages stay off: that of onnxruntime-node downloads the CUDA build.
js/node_modules/installed: js/package.json js/package-lock.json
	@command -v node >/dev/null || { echo "No node was found: install Node.js 20 or newer, from https://nodejs.org." >&2; exit 1; }
	cd js && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

build/web/training: examples/web/make_model.py examples/web/federated/make_folder.py | .venv-dev/installed
	mkdir -p build/web
	$(dev) examples/web/make_model.py build/web
	$(dev) examples/web/federated/make_folder.py build/web/federated
	@touch $@
