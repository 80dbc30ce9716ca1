# make train: everything from a clean checkout. Needs Python 3.11-3.13 and pip; see `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test test-mjlab test-libero test-lerobot test-openvla test-vllm test-trackers test-sb3 test-openpi test-import check bench docs build clean

ARGS ?=
# Tests of failures wait for time limits, so that two cores run three files at a time.
JOBS ?= 3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c scripts/constraints.txt
# An inherited PYTHONDONTWRITEBYTECODE would make hundreds of processes compile our modules again.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive MUJOCO_GL=egl PYTHONDONTWRITEBYTECODE=
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# The first supported interpreter that runs (a name on the path may be a shim of a version that is
# not installed).
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo "$$python"; break; }; done)

IMPORT_LIBRARIES := sb3 rsl_rl cleanrl

help: ## print this list
	@awk -F ' *## ' \
		'/^[a-z0-9-]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-11s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)
	@echo "  ARGS='...' goes to train, test and bench:  make train ARGS='seed=1 updates=10'"
	@echo "  PYTHON=... chooses the interpreter of .venv"

train: .venv/base ## train experiment=quickstart, or the one named in ARGS='experiment=NAME ...'
	$(BIN)/embodied-ppo train $(if $(filter experiment=%,$(ARGS)),,experiment=quickstart) $(ARGS)

test: .venv/dev ## run all tests, JOBS=3 files at a time; ARGS="-m 'not slow'" for the fast ones
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-mjlab: .venv-mjlab/ready ## run the tests with mjlab in a separate environment (4 GB)
	$(TEST_ENV) .venv-mjlab/bin/python -m pytest -q tests/extras/test_mjlab.py $(ARGS)

test-libero: .venv-libero/ready ## run the tests with LIBERO; LIBERO_ASSETS=FOLDER: its scenes
	$(TEST_ENV) .venv-libero/bin/python -m pytest -q tests/extras/test_libero.py $(ARGS)

test-lerobot: .venv/dev .venv-lerobot/ready ## compare with lerobot's policies, in its own environment (5 GB)
	$(TEST_ENV) LEROBOT_PYTHON=.venv-lerobot/bin/python \
		$(BIN)/python -m pytest -q -rP tests/extras/test_lerobot.py $(ARGS)

test-openvla: ## compare with OpenVLA's code: OPENVLA_PYTHON, OPENVLA_CLONE, OPENVLA_OFT_CLONE
	$(TEST_ENV) OPENVLA_PYTHON="$(OPENVLA_PYTHON)" OPENVLA_CLONE="$(OPENVLA_CLONE)" \
		OPENVLA_OFT_CLONE="$(OPENVLA_OFT_CLONE)" \
		$(BIN)/python -m pytest -q -rP tests/extras/test_openvla_code.py $(ARGS)

test-vllm: ## run the tests with vLLM in your environment: VLLM_PYTHON=/path/to/python
	$(TEST_ENV) PYTHONPATH=. $(VLLM_PYTHON) -m pytest -q tests/extras/test_vllm.py $(ARGS)

test-trackers: .venv-trackers/ready ## run the tests with wandb and MLflow in .venv and 0.2 GB more
	$(TEST_ENV) .venv-trackers/bin/python -m pytest -q tests/extras/test_trackers.py $(ARGS)

test-sb3: .venv-sb3/ready ## train with Stable-Baselines3 and embodied-envs, in their own environment (1 GB)
	$(TEST_ENV) SB3_PYTHON=.venv-sb3/bin/python $(BIN)/python -m pytest -q tests/extras/test_sb3.py $(ARGS)

test-openpi: .venv/dev .venv-openpi/ready ## compare with openpi's client and the clone OPENPI_CLONE
	$(TEST_ENV) OPENPI_PYTHON=.venv-openpi/bin/python OPENPI_CLONE="$(OPENPI_CLONE)" \
		$(BIN)/python -m pytest -q -rP tests/extras/test_openpi.py $(ARGS)

test-import: .venv/dev $(IMPORT_LIBRARIES:%=.venv-import/%/ready) ## compare imported policies with six libraries (5 GB)
	$(TEST_ENV) IMPORT_ENVIRONMENTS=.venv-import \
		$(BIN)/python -m pytest -q -rP tests/extras/test_import_policies.py $(ARGS)

check: .venv/dev ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: .venv/dev ## measure training and generation; ARGS: other parts, options (scripts/bench.py --help)
	$(BIN)/python scripts/bench.py $(or $(ARGS),train language)

docs: .venv/dev ## build the documentation site, site/index.html; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "to read it with the search: python3 -m http.server -d site"

build: .venv/dev ## build source distribution and wheels into dist/ and test them
	rm -rf build dist envs/build *.egg-info/SOURCES.txt
	$(BIN)/python -m build
	$(BIN)/python -m build --wheel --outdir dist envs
	EMBODIED_PPO_DIST=dist $(BIN)/python -m pytest -q \
		tests/integration/test_wheel.py tests/integration/test_envs_wheel.py

clean: ## remove .venv, .venv-*, builds and caches, but not runs/
	rm -rf .venv .venv-* build envs/build dist site *.egg-info envs/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find embodied_ppo envs configs tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Create an environment in folder $(1), unless it has one with a supported Python.
define new_venv
$(1)/bin/python -c '$(SUPPORTED)' >/dev/null 2>&1 && exit; \
	python="$(PYTHON)"; \
	[ -n "$$python" ] || { \
		echo "make: no Python 3.11, 3.12 or 3.13 on the path. Debian: apt-get install python3" \
			"python3-venv; elsewhere: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	}; \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null || { \
		version=$$("$$python" -V 2>/dev/null || echo "not a working interpreter"); \
		echo "make: PYTHON=$$python is $$version; needed: Python 3.11, 3.12 or 3.13" >&2; \
		exit 1; \
	}; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $$python cannot create virtual environments." \
			"Debian: apt-get install python3-venv" >&2; \
		exit 1; \
	}; \
	"$$python" -m venv --clear $(1)
endef

# The stamp is inside .venv and written last, so that an interrupted installation is repeated.
.venv/base: pyproject.toml scripts/constraints.txt
	@$(call new_venv,.venv)
	$(PIP) -e '.[language]'
	@touch $@

.venv/dev: .venv/base
	$(PIP) -e '.[dev]'
	@touch $@

# The packages of .venv and those of the trackers.
.venv-trackers/ready: .venv/dev
	$(BIN)/python -m venv --clear .venv-trackers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(.venv-trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	.venv-trackers/bin/python -m pip --disable-pip-version-check install \
		-c scripts/constraints.txt -e '.[wandb,mlflow]'
	@touch $@

# lerobot needs Python 3.12 or later and versions of its own: our code is not installed there.
LEROBOT_BASE ?= $(shell for python in python3.12 python3.13; do \
	"$$python" -c '' >/dev/null 2>&1 && { echo "$$python"; break; }; done)
.venv-lerobot/ready: scripts/constraints-lerobot.txt
	@[ -n "$(LEROBOT_BASE)" ] || { \
		echo "make: no Python 3.12 or 3.13 on the path, which lerobot needs; elsewhere:" \
			"make LEROBOT_BASE=/path/to/python3.12 test-lerobot" >&2; \
		exit 1; \
	}
	"$(LEROBOT_BASE)" -m venv --clear .venv-lerobot
	.venv-lerobot/bin/python -m pip --disable-pip-version-check install \
		-c scripts/constraints-lerobot.txt 'lerobot[pi,smolvla,peft]'
	@touch $@

# The trainer is not installed there.
.venv-sb3/ready: .venv/dev envs/pyproject.toml $(shell find envs/embodied_envs -name '*.py')
	$(BIN)/python -m venv --clear .venv-sb3
	rm -rf envs/build
	.venv-sb3/bin/python -m pip --disable-pip-version-check install \
		-c scripts/constraints.txt ./envs stable-baselines3==2.9.2
	@touch $@

# The client needs numpy 1, and does not declare typing_extensions.
.venv-openpi/ready:
	$(PYTHON) -m venv --clear .venv-openpi
	.venv-openpi/bin/python -m pip --disable-pip-version-check install \
		openpi-client==0.1.2 typing_extensions
	@touch $@

# An environment for each library whose policies are imported, without the trainer. CleanRL is
# scripts: its policies need torch only.
IMPORT_sb3 := stable-baselines3==2.9.2
IMPORT_rsl_rl := rsl-rl-lib==5.5.1
IMPORT_cleanrl := torch
.venv-import/%/ready: .venv/dev
	$(BIN)/python -m venv --clear .venv-import/$*
	.venv-import/$*/bin/python -m pip --disable-pip-version-check install \
		-c scripts/constraints.txt 'gymnasium[mujoco]' $(IMPORT_$*)
	@touch $@

# torchvision is installed as a dependency; its wheel does not match torch, and no code here needs
# it.
.venv-%/ready: pyproject.toml scripts/constraints-%.txt
	@$(call new_venv,.venv-$*)
	.venv-$*/bin/python -m pip --disable-pip-version-check install \
		-c scripts/constraints-$*.txt -e '.[$*]' pytest hypothesis
	.venv-$*/bin/python -m pip uninstall -q -y torchvision
	@touch $@
