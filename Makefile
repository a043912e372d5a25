# Each target does its own set-up: a virtual environment in .venv, installed under constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# One torch thread a process: bitwise laws hold at equal thread counts, and the tests run in several processes. Each of
# these, and each that a test starts, reads the bytecode that the first has compiled.
ONE := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Four processes for two cores: tests over ranks, which two of them run first (tests/conftest.py), wait half of the time.
DOCUMENTS := $(addprefix tests/,test_docs.py test_notebook.py test_site.py test_architecture.py scheduler/test_schedules_page.py)
TESTS := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(DOCUMENTS))

# Peers of pipeline.curvature, without the torchvision that they ask for and do not use here: its builds are for CUDA,
# and beside torch's CPU build one breaks what imports it.
PEERS := curvlinops-for-pytorch backpack-for-pytorch einconv einops linear_operator opt_einsum unfoldNd

.PHONY: demo test test-long test-accelerator longest check docs package soak bench test-gpu test-gpu-sanitize clean

demo: $(READY)
	$(BIN)/python examples/digits.py
	$(BIN)/python examples/characters.py
	$(BIN)/python examples/hessian_product.py

test: $(READY)
	$(ONE) $(TESTS) -m "not soak and not long"

# The longest tests, which take two thirds of the time of all; make longest measures anew which these are.
test-long: $(READY)
	$(ONE) $(TESTS) -m "long and not soak"

longest: $(READY)
	$(ONE) $(TESTS) --longest

# Pipes on a simulated accelerator, on which a missing wait is an error: tests/accelerator/simulated.py. Compiled once,
# which takes a minute and a C++ compiler; without one the tests are skipped. Apart from the others, as the device is
# what torch.accelerator finds in the whole process.
test-accelerator: $(READY)
	$(BIN)/python tests/accelerator/simulated.py
	$(ONE) $(BIN)/python -m pytest -n 2 tests/accelerator

check: $(READY)
	$(BIN)/flake8 pipeline partition scheduler tests examples benchmarks docs
	$(BIN)/isort --check-only pipeline partition scheduler tests examples benchmarks docs
	$(BIN)/mypy
	$(ONE) $(BIN)/python -m pytest -q --doctest-modules pipeline partition scheduler $(DOCUMENTS)

# The documentation as a site in build/docs. A warning (a link or a docstring that cannot be read) is an error.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs
	@echo open build/docs/index.html

# Wheel and sdist, built and installed into an empty environment: some minutes, most of which are torch's.
package: $(READY)
	$(BIN)/python -m pytest -q tests/packaging

soak: $(READY)
	$(ONE) $(TESTS) --whole -m "soak or not soak"
	$(ONE) $(BIN)/python -m pytest -n 2 -q --whole tests/pipeline --drive apart,threads
	$(ONE) $(BIN)/python tests/ranks/fault_soak.py --count 200

bench: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[bench]"
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/families.py
	$(BIN)/python benchmarks/split.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/cuts.py
	$(BIN)/python benchmarks/predicted.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/eager.py
	$(BIN)/python benchmarks/curvature.py
	$(BIN)/python benchmarks/torchgpipe.py

test-gpu: $(READY)
	$(BIN)/python -m pytest --whole -m gpu

# The first thing to run on a GPU: torch raises where a kernel's use of memory is ordered by no event; a test that takes
# ten minutes prints the stacks of all threads, and ends the run.
test-gpu-sanitize: $(READY)
	TORCH_CUDA_SANITIZER=1 $(BIN)/python -m pytest --whole -m gpu tests/gpu \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

$(READY): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[examples,test,check,docs]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps $(PEERS)
	touch $(READY)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache
