# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types docs images unit rights matrix mutants stress devices gpu gpu-long chaos soak engines bench clean

demo: $(VENV)/runtime
	$(BIN)/python examples/demo.py

test: lint types docs unit

# With bars at a terminal. On Linux, the torch of PyPI brings gigabytes for accelerators; where there
# is none, it is torch's build for CPUs, if the machine can reach it.
PIP := $(BIN)/python -m pip install $(shell [ -t 2 ] || echo --quiet) --constraint constraints.txt
ACCELERATORS := /dev/nvidiactl /dev/kfd /dev/dxg

$(VENV)/runtime: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(wildcard $(ACCELERATORS)),,$(PIP) --no-deps --retries 0 --timeout 20 \
		--index-url https://download.pytorch.org/whl/cpu torch 2> /dev/null \
		|| echo "its build for CPUs is not to be had there: torch comes from the default index")
	$(PIP) --editable .
	touch $@

$(VENV)/installed: $(VENV)/runtime
	$(PIP) --editable '.[test,dev,docs,hf,tensorboard,prometheus]'
	touch $@

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYTHONPATH=tests $(BIN)/python -m support.docstrings

types: $(VENV)/installed
	$(BIN)/mypy

# The site, into site/, in a few seconds. The variable keeps the theme from talking about its successor.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of README and docs, each by what draws it. Where Chromium (report.png, live.png) or
# matplotlib (the curves of benchmarks) is absent, it says so, and those stay as they are.
images: $(VENV)/installed
	$(BIN)/python benchmarks/studies/pictures.py

# Two processes share the tests, file by file, since most of the time is that of one core; the
# longest files first. At the end the slowest are told, and those that took twice their time.
# Tests start hundreds of interpreters, each of which would compile the library if none may keep it.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Of these, what root alone may do: namespaces, mounts, packet filters. Others skip it in `make unit`.
# The files with such a test are named, since to import all of them takes longer than some of the tests.
rights: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -rs -m "rights and not stress" \
		$$(grep -rlw rights tests --include='test_*.py')

# A quick selection of them with each version of Python and torch that is promised, in environments
# of their own; what it finds is written into docs/reference/versions.md.
matrix: $(VENV)/installed
	$(BIN)/python tests/support/matrix.py

# Faults of one line in the library, one at a time: which do the tests notice? What is known already,
# in benchmarks/results/mutants.jsonl, is not tried again; the table is docs/design/mutants.md.
mutants: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m support.mutants entered
	PYTHONPATH=tests $(BIN)/python -m support.mutants run
	PYTHONPATH=tests $(BIN)/python -m support.mutants table

# Many seeds and long runs; and what the stand-in for an accelerator must give the same bits for.
stress: $(VENV)/installed devices
	$(BIN)/python -m pytest -m stress -s --timeout 3600 -o faulthandler_timeout=3600

# The tests of exactness, any model, recovery and compatibility, with stages on the stand-in, whose
# check is on. A part of it is in `make test` (tests/devices).
devices: $(VENV)/installed
	$(BIN)/python tests/support/device/standin.py
	PYTHONPATH=tests/support/device/autoload $(BIN)/python -m pytest -n 2 --dist loadfile \
		-m "not stress" --device standin $$(cat tests/support/device/suites.txt)

# On a machine with an accelerator, where nothing has been set up: no environment is made and nothing
# is downloaded, and the first lines say what is missing. WHEELS names a folder of what is.
# DEVICE=cpu tries it without one; DEVICE=standin, on the two devices of the stand-in.
gpu gpu-long:
	$(PYTHON) benchmarks/gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(filter gpu-long,$@),devices,gpu)

# Workers and scripts that die, hang and raise at random places: the long versions of three files of
# tests, which are part of `make stress` too; they print their seeds.
chaos: $(VENV)/installed
	$(BIN)/python -m pytest -m stress -s --timeout 3600 -o faulthandler_timeout=3600 \
		tests/properties/test_chaos.py tests/coordinator/test_resume.py tests/coordinator/recovery/test_recovery.py

# Hours of a run with faults of all kinds at once; it prints what has grown, and whether bits are equal.
HOURS ?= 2
soak: $(VENV)/installed
	$(BIN)/python benchmarks/studies/soak.py --hours $(HOURS)

# Jobs under the engines themselves: Ray, a real Slurm (Debian's packages, installed if this is root
# and they are missing), and Kubernetes' schemas with a kubelet that is played.
engines: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engines]'
	command -v slurmctld > /dev/null || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get \
		install -y --no-install-recommends slurmctld slurmd slurm-client munge; }
	$(BIN)/python -m pytest -n 2 --dist loadfile -rs -m "stress or not stress" tests/cluster/engines

# The suite of benchmarks, which takes about two hours; `python -m benchmarks --help` has parts of it.
bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .matrix .mutants build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
