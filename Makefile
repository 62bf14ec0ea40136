# Every target sets up what it needs in .venv; PYTHON picks the interpreter it is made with (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Or each of the thousands of processes would compile the same modules.
unexport PYTHONDONTWRITEBYTECODE
# Tests that wait for a cluster, or for a run that another began, leave their core to others: one process more than cores.
WORKERS := $(shell echo $$(($$(nproc) + 1)))
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: setup demo test test-all test-pythons test-measured lint bench bench-engine picture layouts numerics published accuracy golden reference schemas clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       set up and run the tiny Llama 3.1 benchmark to a result table"
	@echo "make test       set up and run the quick tests"
	@echo "make test-all   also the slow ones: all that each change has to pass"
	@echo "make test-measured  the rest: full tables, long kills, causes of slowness; before a release"
	@echo "make test-pythons  the quick tests, with the oldest and the newest Python that is here"
	@echo "make lint       ruff, mypy --strict, import-linter"
	@echo "make bench      the benchmarks of the tool itself"
	@echo "make bench-engine  compare engines on one GPU, 9 minutes of it; rerun it for the rest"
	@echo "make layouts    measure docs/reference/layouts.md again (half an hour on 2 cores)"
	@echo "make numerics   measure docs/reference/numerics.md again (a quarter of an hour on 2 cores)"
	@echo "make published  count docs/reference/published-layouts.md again (an hour on 2 cores)"
	@echo "make accuracy   fit the rates of predictions, and write docs/reference/prediction-accuracy.md again"
	@echo "make golden     rewrite the batch scripts that tests compare with"
	@echo "make reference  regenerate pages of docs/reference"
	@echo "make picture    draw docs/report.png and make docs/gallery.html again, of runs made for them (2 minutes on 2 cores)"
	@echo "make schemas    store the schemas of JSON documents anew, where keys were added"

setup: $(VENV)/.run

$(VENV)/.run: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) scripts/setup.sh $(VENV) ""
	@touch $@

$(VENV)/.dev: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) scripts/setup.sh $(VENV) "test,lint"
	@touch $(VENV)/.run $@

demo: $(VENV)/.run
	$(BIN)/llmb run -w pretrain_llama3.1 -s tiny

# TESTS picks some, such as TESTS=tests/cli, and MARKS by their markers.
MARKS := not slow and not measured
test: $(VENV)/.dev
	$(PYTEST) -m "$(MARKS)" $(TESTS)

test-all: $(VENV)/.dev
	$(PYTEST) -m "not measured"

# Root has them run by an ordinary user, who is made for it.
test-pythons: $(VENV)/.dev
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	for action in install test; do $(BIN)/python scripts/try_pythons.py $$action "$$folder"; done

test-measured: $(VENV)/.dev
	$(PYTEST) -m measured

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.parse_logs
	$(BIN)/python -m benchmarks.nccl_logs
	$(BIN)/python -m benchmarks.clean_ends
	$(BIN)/python -m benchmarks.jobs
	$(BIN)/python -m benchmarks.engine_overhead
	$(BIN)/python -m benchmarks.fp8_on_cpu
	$(BIN)/python -m benchmarks.pretended_rank
	$(BIN)/python -m benchmarks.products
	$(BIN)/python -m benchmarks.checksums
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.import_weights
	$(BIN)/python -m benchmarks.data_loading
	$(BIN)/python -m benchmarks.explain_causes
	$(BIN)/python -m benchmarks.verdict_calibration
	$(BIN)/python -m benchmarks.resource_sampling
	$(BIN)/python -m benchmarks.report_page
	$(BIN)/python -m benchmarks.engine.pairs

# ENGINE_OPTIONS are those of python -m benchmarks.engine, such as "--models 8b --dtypes bf16".
bench-engine: $(VENV)/.dev
	$(BIN)/python -m benchmarks.engine --out build/engine.json $(ENGINE_OPTIONS)

picture: $(VENV)/.dev
	$(BIN)/python scripts/draw_report.py

numerics: $(VENV)/.dev
	LLMB_NUMERICS_TABLE=1 $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=3700 tests/engine/test_model_numerics.py
	$(BIN)/python -m benchmarks.rounding

layouts: $(VENV)/.dev
	LLMB_LAYOUT_TABLE=1 $(BIN)/pytest tests/engine/test_parallel_layouts.py

published: $(VENV)/.dev
	$(BIN)/python -m benchmarks.published_layouts

accuracy: $(VENV)/.dev
	$(BIN)/python -m benchmarks.predict.fit
	$(BIN)/python -m benchmarks.predict.accuracy

golden: $(VENV)/.dev
	LLMB_GOLDEN=1 $(BIN)/pytest tests/launch/slurm/test_script_golden.py tests/launch/programs/megatron_bridge/test_megatron_bridge.py tests/launch/programs/torchtitan/test_torchtitan.py

reference: $(VENV)/.run
	$(BIN)/python scripts/generate_reference.py

# FREEZE_OPTIONS="--breaking" also removes keys and changes types, which breaks programs of users.
schemas: $(VENV)/.run
	$(BIN)/python tests/support/freeze_schemas.py $(FREEZE_OPTIONS)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
