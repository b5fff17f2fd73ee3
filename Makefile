# Every target sets up what it needs in .venv, which requires Python 3.11 or newer with venv. Set-up is repeated only when
# pyproject.toml or constraints.txt changed. ARGS="..." is passed to the command. `make gpu` sets up nothing where
# $(PYTHON) has torch and triton, as on a GPU machine without network.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

BIN      := .venv/bin
READY    := .venv/.ready
DEV      := .venv/.ready-dev
DOCS     := .venv/.ready-docs
REWARD   := build/image-reward
REPORT   := build/tests.xml
STARTED  := $(shell date +%s)
# ARGS goes before the arguments of the default run, or replaces them where it chooses a method.
DEFAULT  := method=cool_sd delta=1.1 n=16
RUN_ARGS  = $(if $(filter method=% experiment=%,$(ARGS)),,$(foreach d,$(DEFAULT),$(if $(filter $(firstword $(subst =, ,$(d)))=%,$(ARGS)),,$(d)))) $(ARGS)

# Imports compile once: without bytecode files every process of a test compiles torch again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help run test test-image-reward mutants pages check-pages evidence tables bench gpu train-scenes train-textures train-fashion lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' Makefile

run: $(READY) ## decode, score and time 16 images with the embedded model (ARGS="method=eagle1 n=4" for another run)
	"$(BIN)/specbench" run $(RUN_ARGS)

tables: $(READY) ## run what the tables still need, then draw them (ARGS="--list" shows their state, ARGS="--jobs 4" runs four lines at a time; MODEL=llamagen_xl)
	"$(BIN)/specbench" tables $(if $(MODEL),--model $(MODEL)) $(ARGS)

bench: $(READY) ## time steps at real sizes with random weights; needs a CUDA device (rows to results/bench/)
	scripts/bench_gpu.sh "$(BIN)/specbench"

gpu: ## on a GPU: compiled kernels, gates, a step of each method (a dry run where there is none; ARGS="gates" for a part)
	@"$(PYTHON)" -c 'import torch, triton' 2>/dev/null || $(MAKE) --no-print-directory $(READY)
	@python="$(BIN)/python"; "$(PYTHON)" -c 'import torch, triton' 2>/dev/null && python="$(PYTHON)"; \
	  "$$python" scripts/check_gpu.py $(ARGS)

train-scenes: $(READY) ## rebuild the embedded models from nothing; resumes where it was stopped
	"$(BIN)/python" -m tools.scenes $(ARGS)

train-textures: $(READY) ## the same for the models of the second world
	"$(BIN)/python" -m tools.scenes --world textures $(ARGS)

train-fashion: $(READY) ## the same for the model of photographs (needs Debian's package dataset-fashion-mnist)
	"$(BIN)/python" -m tools.scenes --world fashion $(ARGS)

test: $(DEV) ## format check, lint, types, then every test (ARGS="-k name" for some; WORKERS=4 for more processes)
	@scripts/browser.sh & browser=$$!; $(MAKE) --no-print-directory lint && wait $$browser
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 "$(BIN)/python" -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --junitxml=$(REPORT) $(ARGS); \
	  code=$$?; "$(BIN)/python" scripts/test_time.py $(REPORT) $(STARTED) && exit $$code

test-image-reward: $(REWARD)/.ready ## compare our ImageReward with the package of its authors, which needs an environment of its own
	"$(REWARD)/bin/python" -m pytest tests/metrics/test_image_reward_package.py

pages: $(READY) ## write README and the pages of docs and results from their templates (docs/templates) and the rows
	"$(BIN)/python" scripts/pages.py --write

check-pages: $(READY) ## check that they are what templates and rows give, and that the rows are of the commits that numbers.yaml names
	"$(BIN)/python" scripts/pages.py

evidence: $(READY) ## make the committed rows anew, all from this commit: hours (ARGS="--list": the steps and what each costs)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 "$(BIN)/python" scripts/evidence.py $(ARGS)

mutants: $(DEV) ## put mistakes into the code, one at a time, and see that the audit catches each (minutes)
	OMP_NUM_THREADS=1 "$(BIN)/python" scripts/mutants.py $(ARGS)

lint: $(DEV) ## format check, lint and types only
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"

format: $(DEV) ## rewrite the sources in the project's format
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --fix .

docs: $(DOCS) ## the documentation as a site, with results and the API, in build/docs; a warning is an error
	mkdir -p build/pages && ln -sfn $(foreach f,README.md CONTRIBUTING.md CITATION.cff LICENSE docs results,../../$(f)) build/pages/
	OMP_NUM_THREADS=1 "$(BIN)/python" -W error::UserWarning -m pdoc --output-directory build/pages/reference specbench
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --quiet --strict --config-file docs/mkdocs.yml
	@echo "wrote build/docs/index.html"

clean: ## remove .venv, caches and build outputs (runs/, .train/ and results/ stay)
	rm -rf .venv build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(call install,.)
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(READY) $@

$(DOCS): pyproject.toml constraints.txt
	$(call install,.[docs])
	@touch $(READY) $@

$(REWARD)/.ready: pyproject.toml # the package's pins do not fit constraints.txt
	"$(PYTHON)" -m venv $(REWARD)
	"$(REWARD)/bin/python" -m pip install --quiet uv pytest
	. "$(REWARD)/bin/activate" && uv pip install -e '.[image-reward]'
	@touch $@

define install
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'specbench needs Python 3.11 or newer, and "$(PYTHON)" is not: name one with make PYTHON=python3.12 ...' >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { \
	  echo 'cannot create .venv: install the venv module of "$(PYTHON)" (on Debian and Ubuntu the package python3-venv)' >&2; exit 1; }
	@echo 'setting up .venv (the first time this fetches about 3 GB, most of it torch)'
	"$(BIN)/python" -m pip install --quiet --constraint constraints.txt uv
	"$(BIN)/uv" pip install --python "$(BIN)/python" --constraint constraints.txt --editable '$(1)'
endef
