# make test    all that must hold before a change goes in; sets up all it needs
# make quick   the checks of every few minutes, on a built checkout
# make train   builds everything and trains: DATA=path for your own data, ARGS="..." for options of `recstore train`
# make help    all targets

# The interpreter that the virtual environment is made from, and the torch that goes into it.
PYTHON ?= python3
TORCH ?= 2.13.0
# The release that tch, the oracle of the Rust tests, is bound to.
TCH_TORCH := 2.13.0
DATA ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
TORCH_READY := $(STAMPS)/torch-$(TORCH)
BUILDER_READY := $(STAMPS)/builder
TOOLS_READY := $(STAMPS)/tools
WHEEL_READY := $(STAMPS)/wheel
# The package in the environment: as a wheel, or as it lies here; one takes the place of the other.
PACKAGE_READY := $(STAMPS)/package
DEVELOPED := $(STAMPS)/developed

RUST_SOURCES := $(shell find rust cxx_bridge -type f -not -path '*/tests/*' -not -path '*/benches/*' -not -path '*/examples/*')
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name 'py.typed')
PACKAGE_SOURCES := Cargo.toml Cargo.lock pyproject.toml setup_torch.py $(RUST_SOURCES) $(PYTHON_SOURCES)

# One environment for every cargo command: another one would compile torch-sys and pyo3 again.
export LIBTORCH_USE_PYTORCH := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONHOME PYTHONPATH
# Torch is installed without bytecode: processes that may not write it would compile it again, seven seconds each.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: venv
venv: $(TOOLS_READY) ## the virtual environment .venv, with TORCH=version (default 2.13.0)

# Without bytecode of what is installed: of 12,000 files a tenth are imported, and Python compiles those by itself.
INSTALL := $(PIP) install --no-compile

$(TORCH_READY):
	@echo "== Python environment with torch $(TORCH) in $(VENV) (several GB the first time: a minute or more)"
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON); set PYTHON to an interpreter of version 3.10 or newer" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==$(TORCH)
	mkdir -p $(STAMPS)
	rm -f $(STAMPS)/torch-*
	touch $@

# Of the developers' tools only the one that builds, in the same version.
$(BUILDER_READY): requirements-dev.txt $(TORCH_READY)
	$(INSTALL) --quiet $$(grep '^maturin==' requirements-dev.txt)
	touch $@

$(TOOLS_READY): requirements-dev.txt $(TORCH_READY)
	@echo "== development tools"
	$(INSTALL) --quiet --requirement requirements-dev.txt
	touch $@ $(BUILDER_READY)

.PHONY: build
build: $(PACKAGE_READY) ## compiles and installs recstore-ops into .venv

$(PACKAGE_READY): $(PACKAGE_SOURCES) $(BUILDER_READY)
	@echo "== recstore-ops: compiles the store (the first time about four minutes on two cores), then installs it"
	@command -v cargo >/dev/null || { echo "make: no cargo; install a Rust toolchain" >&2; exit 1; }
	rm -f $(DEVELOPED)
	$(PIP) install --verbose --no-build-isolation '.[train]'
	touch $@

# What tests run on: the package as it lies here, with the native module of the profile `dev`. A change of a .py file
# needs nothing; a change of a Rust file builds what depends on it.
.PHONY: develop
develop: $(DEVELOPED) ## installs recstore-ops into .venv as it lies here, for work on it

$(DEVELOPED): Cargo.toml Cargo.lock pyproject.toml setup_torch.py $(RUST_SOURCES) $(TOOLS_READY)
	@command -v cargo >/dev/null || { echo "make: no cargo; install a Rust toolchain" >&2; exit 1; }
	rm -f $(PACKAGE_READY)
	$(PIP) install --verbose --no-build-isolation --editable '.[train]'
	touch $@

.PHONY: train
train: build ## builds what it needs and trains on planted data, or on DATA=path; ARGS="..." for options
	$(BIN)/recstore train $(or $(DATA),--planted pairs) $(ARGS)

# The tiers of checks, docs/testing.md: `quick` while one works, `test` before a change goes in, `test-all` before a release.

.PHONY: quick
quick: $(DEVELOPED) ## formatting, lints, types, the core's unit tests and the plain Python tests, on a built checkout
	$(BIN)/python .ci/parts.py check+test-quick

.PHONY: test
test: venv ## all that must hold before a change goes in; sets up all it needs
	$(BIN)/python .ci/parts.py build-tests test-rust+test-python+check test-served

.PHONY: test-all
test-all: venv ## everything, and writes down what it took: AddressSanitizer, servers, ranks, Ray, trainers, kills, churn, pages, the site
	$(BIN)/python .ci/parts.py --record docs/testing.md build-tests check docs test-rust test-torch test-sanitized \
	  test-python-all+test-kills test-served-all test-trainers test-churn test-pages

.PHONY: build-tests
build-tests: $(DEVELOPED)
	cargo test --quiet $(DEVELOPED_CRATES) --no-run
	cargo test --quiet $(DEVELOPED_CRATES) --bench store --no-run

.PHONY: test-quick
test-quick: $(DEVELOPED)
	LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) cargo test --quiet $(DEVELOPED_CRATES) --lib
	$(PYTEST) --tier=quick

# Crates whose tests need nothing of libtorch but its headers and its library: all but those that tch links. They are
# always chosen together: the features of one alone are others, and would compile its dependencies again.
DEVELOPED_CRATES := --workspace --exclude recstore-tch --exclude recstore-tests --exclude recstore-python \
	--exclude recstore-runtime

# The tier of the Rust tests that run, by the markers of their files. RUST_TESTS sets `tests` to cargo's options for those
# of a folder, as a command of its own: it ends the recipe where a file has no marker.
TIER ?= test
RUST_TESTS = tests=$$($(BIN)/python .ci/rust_tiers.py $(TIER) $(1))

.PHONY: test-rust
test-rust: $(DEVELOPED) ## the Rust tests, but for those that hold the store against tch
	$(call RUST_TESTS,rust); LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) \
	  cargo test --quiet $(DEVELOPED_CRATES) --lib --examples $$tests
	cargo test --quiet $(DEVELOPED_CRATES) --doc
	cargo test --quiet $(DEVELOPED_CRATES) --bench store > /dev/null
	cargo build --quiet $(DEVELOPED_CRATES) --example own_rule
	"$${CARGO_TARGET_DIR:-target}"/debug/examples/own_rule > /dev/null

.PHONY: test-core
test-core: ## the store's tests: needs Rust only
	cargo test --quiet

# What the profile `dev` leaves out of the store.
CHECKED := --config profile.dev.package.recstore.debug-assertions=true \
  --config profile.dev.package.recstore.overflow-checks=true

# The switch is for nightly compilers; the stable one has it too, but wants to be told that this is meant.
.PHONY: test-sanitized
test-sanitized: ## the store's tests with every addition checked, and every access to memory by AddressSanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address PROPTEST_CASES=16 cargo test --quiet --package recstore $(CHECKED) \
	  --target $$(rustc -vV | sed -n 's/^host: //p') --target-dir target/sanitized \
	  --lib --test determinism --test growth --test concurrency --test errors

# What cargo-fuzz sets: libFuzzer follows edges and comparisons, AddressSanitizer every access.
FUZZ_FLAGS := -Zsanitizer=address -Cpasses=sancov-module --cfg fuzzing $(addprefix -Cllvm-args=-sanitizer-coverage-, \
  level=4 inline-8bit-counters pc-table trace-compares)
FUZZ_TARGETS := frames json log table_file frozen manifest graph
FUZZ_SECONDS ?= 60
FUZZED := target/fuzzed

# What is found lies in $(FUZZED)/found; what was seen stays in the corpus for the next run.
.PHONY: fuzz
fuzz: ## libFuzzer on all that reads bytes of others, a minute each; FUZZ_SECONDS and FUZZ_TARGETS for others
	host=$$(rustc -vV | sed -n 's/^host: //p'); \
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --quiet --release --manifest-path fuzz/Cargo.toml \
	  --target $$host --target-dir $(FUZZED); \
	built=$(FUZZED)/$$host/release; mkdir -p $(FUZZED)/found; \
	$$built/corpus $(FUZZED)/corpus; \
	for target in $(FUZZ_TARGETS); do \
	  echo "== $$target"; \
	  $$built/$$target $(FUZZED)/corpus/$$target -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 \
	    -max_len=65536 -artifact_prefix=$(FUZZED)/found/$$target- -verbosity=0 -print_final_stats=1; \
	done

# Always chosen together, as those above.
LINKED_CRATES := --package recstore-tch --package recstore-tests --package recstore-runtime

.PHONY: test-torch
test-torch: $(TOOLS_READY) ## the Rust tests that link libtorch's C++
ifeq ($(TORCH),$(TCH_TORCH))
	cargo clippy --quiet $(LINKED_CRATES) --all-targets -- --deny warnings
	LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) cargo test --quiet $(LINKED_CRATES)
	LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) cargo run --quiet --package recstore-tch --example train_with_tch
else
	@echo "tch is bound to torch $(TCH_TORCH): its tests are left out with torch $(TORCH)"
endif

# The folder of libtorch, found without importing torch.
TORCH_LIBRARIES := $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0] + "/lib")'

# A file goes to one process: its tests share what they set up. Files go in the order of tests/python/tiers.py, at
# random but for those that take longest, and not by their numbers of tests. A run says the seed of its order.
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: test-python
test-python: $(DEVELOPED) ## the Python tests, but for those that take long
	$(PYTEST) --tier=test --durations 20

.PHONY: test-python-all
test-python-all: $(DEVELOPED) ## all Python tests
	$(PYTEST) --durations 40 tests/python

# What models see of tables; what does not hold on servers is marked, and docs/design.md says why. Whole trainings on
# real data show nothing more here, and take long.
SERVED := batch client dist_embedding dist_tensor embedding_bag_collection embedding_collection fused_prefetch \
	gradient_scaling hashtable hashtable_ops lifecycle ops parity prefetch row_types sparse_optimizer store_model

.PHONY: test-served
test-served: $(DEVELOPED) ## a few of the Python tests again, their tables on one server and on three
	env -u RECSTORE_DATA $(BIN)/python -m pytest --quiet --tier=quick --served 1 tests/python/test_ops.py
	env -u RECSTORE_DATA $(BIN)/python -m pytest --quiet --tier=quick --served 3 tests/python/test_sparse_optimizer.py

.PHONY: test-served-all
test-served-all: $(DEVELOPED) ## the Python tests of operators and modules again, their tables on one server and on three
	env -u RECSTORE_DATA $(PYTEST) --served 1 $(SERVED:%=tests/python/test_%.py)
	env -u RECSTORE_DATA $(PYTEST) --served 3 $(SERVED:%=tests/python/test_%.py)

# Hundreds of kills and sequences, and 100 million ids that come and go: they wait more than they compute.
.PHONY: test-kills
test-kills: $(DEVELOPED) ## processes killed hundreds of times, a thousand sequences of what operators do
	LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) RECSTORE_KILL_ROUNDS=200 \
	  cargo test --quiet $(DEVELOPED_CRATES) --test checkpoint_kill --test wal --test faults --test failover
	RECSTORE_REPLICA_SEQUENCES=1000 cargo test --quiet $(DEVELOPED_CRATES) --test replica_sequences
	PROPTEST_CASES=1000 cargo test --quiet $(DEVELOPED_CRATES) --test state_directory after_any_sequence
	PROPTEST_CASES=1000 cargo test --quiet $(DEVELOPED_CRATES) --test checkpoint_lineage nothing_of_another
	RECSTORE_KILL_ROUNDS=100 $(BIN)/python -m pytest --quiet tests/python/test_following_kills.py

# Programs of trainers that others publish. The environment sees what lies in .venv, torch and this package too.
TRAINERS := .venv-trainers
TRAINERS_READY := $(TRAINERS)/ready

.PHONY: test-trainers
test-trainers: $(DEVELOPED) $(TRAINERS_READY) ## programs of Lightning, accelerate, optuna and PyG, in an environment of their own
	$(TRAINERS)/bin/python -m pytest --quiet tests/trainers

PACKAGES_OF = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(TRAINERS_READY): requirements-trainers.txt $(TOOLS_READY)
	@echo "== Lightning, accelerate, optuna and PyG in $(TRAINERS)"
	test -x $(TRAINERS)/bin/python || $(BIN)/python -m venv $(TRAINERS)
	echo "import site; site.addsitedir('$(call PACKAGES_OF,$(VENV))')" > "$(call PACKAGES_OF,$(TRAINERS))/venv.pth"
	$(TRAINERS)/bin/python -m pip --disable-pip-version-check install --no-compile --quiet --requirement requirements-trainers.txt
	touch $@

.PHONY: test-churn
test-churn: ## 100 million ids through one table: time and memory of its last part as of its first
	RECSTORE_CHURN=100000000 cargo test --quiet --release --package recstore --test churn

.PHONY: test-pages
test-pages: $(DEVELOPED) ## 10,000 histories of a table, beside the same table without pages of ids
	LD_LIBRARY_PATH=$$($(TORCH_LIBRARIES)) PROPTEST_CASES=10000 \
	  cargo test --quiet $(DEVELOPED_CRATES) --lib pages_change_no_result

# Not a part of `make test-all`: leave it alone with a machine for a night.
.PHONY: test-long
test-long: $(DEVELOPED) ## every property with many more examples, and an hour of servers under load
	PROPTEST_CASES=2000 cargo test --quiet --release
	RECSTORE_LONG_TESTS=1 RECSTORE_SOAK_SECONDS=3600 $(PYTEST) tests/python

# Docstrings are read and not imported, so the site needs neither torch nor the package.
DOCS := .venv-docs
DOCS_BIN := $(DOCS)/bin
DOCS_READY := $(DOCS)/ready

.PHONY: docs
docs: $(DOCS_READY) ## the site of docs/, with the Python API from its docstrings, in build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict
	@echo "build/site/index.html"

$(DOCS_READY): requirements-docs.txt
	@echo "== mkdocs in $(DOCS)"
	test -x $(DOCS_BIN)/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS_BIN)/python -m pip --disable-pip-version-check install --quiet --requirement requirements-docs.txt
	touch $@

.PHONY: check
check: $(DEVELOPED) ## formatting, lints, types, and the order of the rooms
	cargo fmt --all --check
	cargo clippy --quiet $(DEVELOPED_CRATES) --all-targets -- --deny warnings
	cargo clippy --quiet --package recstore-python -- --deny warnings
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --quiet --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/rust_rooms.py
	$(BIN)/python .ci/opened_files.py
	$(BIN)/python .ci/words.py
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/third_party.py --check
	$(BIN)/python .ci/optimizers.py --check
	$(BIN)/pyright

.PHONY: runtime
runtime: $(TORCH_READY) ## librecstore_runtime, which runs bundles without Python, in target/release
	cargo build --release --package recstore-runtime

# What tests/python/test_runtime*.py run.
.PHONY: runtime-examples
runtime-examples: $(TORCH_READY)
	cargo build --quiet $(LINKED_CRATES) --lib --example predict --example run_programs
	built="$${CARGO_TARGET_DIR:-target}"/debug; for source in examples/predict tests/programs/run_programs; do \
	  $(CXX) -std=c++17 -g -Wall -Wextra -Werror $$source.cpp -o $$built/$$(basename $$source)_cpp \
	    -Irust/recstore-runtime/include -L$$built -lrecstore_runtime -Wl,-rpath,'$$ORIGIN' -Wl,--allow-shlib-undefined; \
	done

# A runner of bundles whose Rust and C++ AddressSanitizer watches.
.PHONY: runtime-sanitized
runtime-sanitized: $(TORCH_READY)
	host=$$(rustc -vV | sed -n 's/^host: //p'); built="$${CARGO_TARGET_DIR:-target}"/sanitized; \
	  RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CXXFLAGS="$(CXXFLAGS) -fsanitize=address" \
	    cargo build --quiet --package recstore-runtime --example run_programs --target $$host --target-dir $$built; \
	  cp $$built/$$host/debug/examples/run_programs $$built/

# Wheels for Linux are linked against the symbols of an older glibc and C++ library than those of this machine.
ifeq ($(shell uname),Linux)
WHEEL_ARGS := --compatibility manylinux_2_28
WHEEL_ENV := CARGO_TARGET_$(shell uname -m | tr a-z A-Z)_UNKNOWN_LINUX_GNU_LINKER=$(CURDIR)/.ci/link_wheel.py \
	CXXFLAGS="$(CXXFLAGS) -include $(CURDIR)/.ci/older_streams.h"
endif

$(WHEEL_READY): requirements-wheel.txt $(BUILDER_READY)
	$(INSTALL) --quiet --requirement requirements-wheel.txt
	touch $@

.PHONY: wheel
wheel: $(WHEEL_READY) ## dist/*.whl, on Linux for every glibc from 2.28 on
	rm -f dist/*.whl
	$(WHEEL_ENV) $(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist --config-settings=build-args="$(WHEEL_ARGS)" .
	$(BIN)/python .ci/check_wheel.py dist/*.whl

.PHONY: sdist
sdist: $(BUILDER_READY) ## dist/*.tar.gz
	rm -f dist/*.tar.gz
	mkdir -p dist
	$(BIN)/python -c 'import setup_torch; setup_torch.build_sdist("dist")'
	@ls dist/*.tar.gz

.PHONY: stranger
stranger: wheel ## times the first steps of a stranger: a clone, a wheel, a CSV file, an answer over HTTP; takes many minutes
	$(BIN)/python .ci/stranger.py $(ARGS)

.PHONY: compat
compat: wheel ## runs the op tests of one wheel on several torch versions, in docs/compat.md; ARGS="--python PATHS" for others
	$(BIN)/python .ci/compat.py dist/*.whl $(ARGS)

PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check
PEERS_READY := $(PEERS)/ready
# The first brings what the wheel needs, the second this wheel in place of another of its version.
INSTALL_WITH_PEERS = $(PEERS_PIP) install --quiet "$$(echo dist/*.whl)[train]" && $(PEERS_PIP) install --quiet --no-deps --force-reinstall dist/*.whl

.PHONY: test-peers
test-peers: wheel $(PEERS_READY) ## compares with TorchRec, FBGEMM and published models, in an environment of their own
	$(INSTALL_WITH_PEERS)
	$(PEERS)/bin/python -m pytest --quiet tests/peers
	$(PEERS)/bin/python examples/from_torchrec.py

$(PEERS_READY):
	@echo "== TorchRec, FBGEMM and others in $(PEERS) (several GB the first time)"
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) install --quiet torch==2.13.0 pytest pytest-timeout tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions iopath
	$(PEERS_PIP) install --quiet --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
	$(PEERS_PIP) install --quiet deepctr-torch==0.3.0 fuxictr==2.3.10 torch-geometric==2.8.1
	# RecBole without its pins, of which ray's has no package for newer Python.
	$(PEERS_PIP) install --quiet scipy tensorboard thop plotly tabulate texttable colorlog==4.7.2 colorama==0.4.4
	$(PEERS_PIP) install --quiet --no-deps recbole==1.2.1
	touch $@

.PHONY: bench
ifneq ($(wildcard $(PEERS_READY)),)
bench: bench-peers ## measures everything beside torch, and FBGEMM where its environment is there; ARGS="..." for options
else
bench: build
	$(BIN)/python benches/run.py $(ARGS)
endif

.PHONY: bench-peers
bench-peers: wheel $(PEERS_READY) ## makes the environment with FBGEMM and measures there
	$(INSTALL_WITH_PEERS)
	$(PEERS)/bin/python benches/run.py $(ARGS)

.PHONY: bench-rust
bench-rust: ## measures the store's calls one by one, without torch; ARGS="..." for criterion's options
	cargo bench --quiet --package recstore --bench store -- $(ARGS)

.PHONY: bench-quick
bench-quick: build ## every bench once with tiny tables: shows that they run
	$(BIN)/python benches/run.py --quick $(ARGS)

.PHONY: clean
clean: ## removes all that was built; keeps .venv
	cargo clean --quiet
	rm -rf build dist python/recstore_ops/*.so $(PACKAGE_READY) $(DEVELOPED)
