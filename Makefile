# Thin front of CMake. `make demo` and `make check` install what is missing, build, and run.
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE_ARGS ?=
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: help all program configure deps demo check check-long check-asan check-ubsan check-tsan fuzz bench lint format install docs clean

help:
	@echo "make demo         build, make a small model, fine-tune it on the bundled data, let it answer (under 3 minutes)"
	@echo "make program      build what make install installs; make all: tests, too"
	@echo "make check        build and run every test"
	@echo "make check-long   every division of a model among 2 to 16 ranks (minutes)"
	@echo "make check-asan   the same under AddressSanitizer; check-ubsan, check-tsan likewise"
	@echo "make fuzz         fuzz every reader of foreign bytes (clang; FUZZ_SECONDS=60 each)"
	@echo "make bench        operators and steps as a share of what the machine can do"
	@echo "make lint         cppcheck, clang-tidy, layers; make format runs clang-format"
	@echo "make install      PREFIX=/usr/local DESTDIR="
	@echo "make docs         the generated pages of docs/"
	@echo "Variables: BUILD=build JOBS=$(JOBS) CMAKE_ARGS=... (for example -DITH_CUDA=off)"

all: configure
	@cmake --build $(BUILD) -j$(JOBS)

program: configure
	@cmake --build $(BUILD) -j$(JOBS) --target program

configure: deps
	@cmake -S . -B $(BUILD) $(CMAKE_ARGS) > $(BUILD).configure.log 2>&1 || { cat $(BUILD).configure.log; exit 1; }
	@grep -- '--   ' $(BUILD).configure.log || true

deps:
	@tools/install_deps.sh $(DEPS)

demo: CMAKE_ARGS += -DITH_TESTS=OFF -DITH_CUDA=off
demo: DEPS := --program
demo: deps
	@BUILD=$(BUILD)-demo JOBS=$(JOBS) CMAKE_ARGS="$(CMAKE_ARGS)" demo/run.sh

check: all
	@tools/run_tests.sh $(BUILD)

check-long: all
	@tests/dist/check_long.sh $(BUILD)

check-asan:
	@$(MAKE) check BUILD=build-asan CMAKE_ARGS="-DITH_SANITIZE=address -DITH_CUDA=off -DCMAKE_BUILD_TYPE=Sanitize"

check-ubsan:
	@$(MAKE) check BUILD=build-ubsan CMAKE_ARGS="-DITH_SANITIZE=undefined -DITH_CUDA=off -DCMAKE_BUILD_TYPE=Sanitize"

check-tsan:
	@$(MAKE) check BUILD=build-tsan CMAKE_ARGS="-DITH_SANITIZE=thread -DITH_CUDA=off -DCMAKE_BUILD_TYPE=Sanitize"

FUZZ_SECONDS ?= 60
fuzz: deps
	@tools/run_fuzz.sh $(FUZZ_SECONDS)

bench: program
	@cmake --build $(BUILD) -j$(JOBS) --target ithaca_bench ithaca_bench_gemm ithaca_bench_step
	@$(BUILD)/bench/ithaca_bench
	@$(BUILD)/bench/ithaca_bench_step model=small batch=4 seq=512 device=cpu profile=1
	@if $(BUILD)/ithaca env | grep -q '^ *device.*cuda\|NVIDIA'; then $(BUILD)/bench/ithaca_bench_step device=cuda profile=1; fi

lint: all
	@tools/lint.sh $(BUILD)

format:
	@find src tests bench include -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inc' | xargs clang-format -i

docs: program
	@cmake --build $(BUILD) --target docs

install: program
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf build build-* *.configure.log
