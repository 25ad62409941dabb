# `make` lists the targets. They make .venv and install what they need the first time, and not again until
# the pins change. The compilers for the GPU (300 MB) have an environment of their own, .venv-aot; so have
# the clients of others (.venv-clients; those in TypeScript need Node.js), what builds the site (.venv-docs),
# what TensorBoard shows profiles with (.venv-pictures, 600 MB), and what drives the browser (.venv-browser),
# which is the system's: where there is none, and this is root's Debian, it is installed.

.DEFAULT_GOAL := help

PYTHON := $(shell for p in python3.12 python3 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL ?=
ARGS ?=

.PHONY: help serve test test-all test-clients test-browser test-cuda-compile soak fuzz lint format docs site pictures page-pictures figures train-forge-tiny clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: .venv/.serve ## serve the bundled model on 127.0.0.1:8000; MODEL=org/name for another, ARGS="..." for flags
	@exec $(BIN)/forge-jax serve $(MODEL) $(ARGS)

NODE_CLIENTS := tests/clients/node
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20

# Tests start hundreds of processes, and without bytecode each would parse all of JAX.
test test-all: export PYTHONDONTWRITEBYTECODE =
# XLA optimises little in `make test` and compiles in half the time; in `make test-all` it is as users have it.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
test: export XLA_FLAGS = --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters

test: .venv/.dev ## run the fast tests in two processes; ARGS="-n 0" for one
	$(PYTEST) -m "not slow and not soak and not fuzz" $(ARGS)

test-all: .venv/.dev ## run every test that CI requires, the slow ones included
	$(PYTEST) -m "not soak and not fuzz" $(ARGS)

test-clients: .venv/.serve .venv-clients/.clients $(NODE_CLIENTS)/node_modules/.clients ## drive a server with other projects' SDKs, agents, evaluations, a router and Ray
	.venv-clients/bin/python -m pytest -c tests/clients/pytest.ini tests/clients $(ARGS)

test-browser: .venv/.serve .venv-browser/.driver ## use the page in headless Chromium
	.venv-browser/bin/python -m pytest -c tests/browser/pytest.ini tests/browser $(ARGS)

test-cuda-compile: .venv-aot/.aot ## compile the GPU kernels and a step for an H200; needs no GPU
	PYTHONPATH=$(CURDIR) .venv-aot/bin/python tests/aot/cuda_compile.py $(ARGS)

soak: .venv/.dev ## run the long tests: leaks, millions of scheduler steps
	$(BIN)/python -m pytest -m soak --timeout 3600

fuzz: .venv/.dev ## send the server 50,000 odd requests; ARGS="--fuzz-seed N" for others
	$(BIN)/python -m pytest -m fuzz --timeout 1200 -s tests/fuzz $(ARGS)

lint: .venv/.dev ## check style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache --no-logo

format: .venv/.dev ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.dev ## write the generated documents: configuration.md, cli.md
	$(BIN)/python -m forge_serve.cli.reference

site: .venv-docs/.docs ## build the documents and the API reference into a site, in ./site
	.venv-docs/bin/sphinx-build -q -E -n -W --keep-going -b html -c docs/site . site
	@echo "built site/index.html"

pictures: .venv/.dev .venv-pictures/.pictures ## make the pictures of docs/profiling.md, with TensorBoard and headless Chromium
	.venv-pictures/bin/python -m tests.browser.profile_pictures $(ARGS)

page-pictures: .venv/.serve .venv-browser/.driver ## take the pictures of the page for the README, with headless Chromium
	.venv-browser/bin/python -m tests.browser.page_pictures $(ARGS)

figures: .venv/.dev ## write the tables of docs/models.md from the tests
	$(BIN)/python tests/figures.py

train-forge-tiny: .venv/.dev ## train the bundled model again
	$(BIN)/python -m training.forge_tiny

clean: ## remove the environments, the tests' cache and the site
	rm -rf .venv .venv-aot .venv-clients .venv-browser .venv-pictures .venv-docs .cache site $(NODE_CLIENTS)/node_modules

.venv/.python:
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer, and none was found: install it (your distribution's python3.12 and python3.12-venv, or: uv python install 3.12), then run make again." >&2; exit 1; }
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.serve: .venv/.python pyproject.toml constraints.txt
	@echo "installing forge-jax and what it needs into .venv (about a minute)"
	@$(PIP) -e .
	@touch $@

.venv/.dev: .venv/.serve pyproject.toml constraints.txt
	@echo "installing what the tests need into .venv"
	@$(PIP) -e ".[dev]"
	@touch $@

.venv-aot/.aot: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing compilers for GPUs into .venv-aot (300 MB)"
	@$(PYTHON) -m venv .venv-aot
	@.venv-aot/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[aot]"
	@touch $@

.venv-clients/.clients: tests/clients/requirements.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@echo "installing the clients of others into .venv-clients"
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@touch $@

NODE_20 := node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)'

$(NODE_CLIENTS)/node_modules/.clients: $(NODE_CLIENTS)/package.json
	@command -v node >/dev/null && command -v npm >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "installing Node.js" && apt-get update -qq >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || { \
		echo "ERROR: make test-clients needs node and npm, which cannot be installed from here: install Node.js 20 or newer (on Debian 13, as root: apt-get install nodejs npm)" >&2; exit 1; }
	@$(NODE_20) || { echo "ERROR: make test-clients needs Node.js 20 or newer, and this is $$(node --version): install a newer one" >&2; exit 1; }
	@echo "installing the clients in TypeScript into $(NODE_CLIENTS)/node_modules (80 MB)"
	@cd $(NODE_CLIENTS) && npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts
	@touch $@

.venv-browser/.driver: tests/browser/requirements.txt
	@test -n "$(PYTHON)" || { echo "forge-jax needs Python 3.12 or newer" >&2; exit 1; }
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "installing chromium (300 MB)" && apt-get update -qq >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || { \
		echo "ERROR: there is no chromium, and it cannot be installed from here: install it (on Debian, as root: apt-get install chromium)" >&2; exit 1; }
	@echo "installing what drives the browser into .venv-browser"
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
	@echo "installing what builds the documents into .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/site/requirements.txt -e .
	@touch $@
