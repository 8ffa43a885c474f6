# make train   set up, then train on the embedded digits: four workers, LARS, a growing batch
# make study   accuracy against batch size on the digits, about five minutes on two cores
# make figure  the same, and its figure put into docs/ for the README
# make test    set up, lint, types, tests
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 4

# Tests start hundreds of processes: what the first has compiled the others need not compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install kernels train study figure test test-systems lint bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "megabatch needs Python 3.11 or newer; set PYTHON="; exit 1; }
	$(PYTHON) -m venv .venv
	@# compat: as a path, where type checkers of other folders find the package.
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[dev]'
	@# On all cores, where pip would take one, without others' tests; files that are no Python of
	@# today's are left.
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' .venv/lib > /dev/null || true
	@touch $@

# Without a GPU the kernels are tested in Triton's interpreter; torch's CPU build brings no Triton,
# and its GPU builds bring the one they want.
kernels: .venv/triton

.venv/triton: .venv/installed
	@$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/pip install --quiet --disable-pip-version-check --no-deps triton==3.8.0 \
		|| echo "Triton cannot be installed here: the tests of the kernels will be skipped"
	@touch $@

train: install
	$(BIN)/megabatch train digits --workers $(WORKERS)

study: install
	$(BIN)/megabatch study digits --batches 32,128,256,512 --seeds 5 \
		--arms sgd no_warmup gamma_one --arm-batches 512 --probe --out runs/study-digits

# The README's figure, from the study of `make study`: only when it is to be another one.
figure: study
	cp runs/study-digits/error.svg docs/study.svg

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two more than two cores: many tests wait for processes they have started, stopped or killed.
test: lint kernels
	$(BIN)/pytest -n 4 --dist worksteal -m "not systems and not gpu"

# What needs root, namespaces, browsers or schedulers, or takes long.
test-systems: install kernels
	scripts/install-systems.sh
	@# Those of tests/systems have the machine's hosts, ports and cores to themselves; the others take long.
	$(BIN)/pytest -m systems tests/systems
	$(BIN)/pytest -n 2 --dist worksteal -m systems --ignore tests/systems

# The second half wants root (network namespaces) and a machine with nothing else to do.
bench: install
	$(BIN)/python benchmarks/lars.py
	$(BIN)/python benchmarks/hosts.py --hosts 4 --workers 4 --rate 200mbit -- \
		$(BIN)/megabatch bench sync --out results/sync/4x4-200mbit.json --machine results/sync/machine.json

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
