# make setup   .venv with everything, as pinned in constraints.txt
# make demo    the main job on the built-in tiny model
# make test    what CI runs: ruff, mypy, pytest
# On a machine with a GPU, choose the build of torch: make setup TORCH="torch==2.11.0 --index-url https://..."
PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: setup demo test lint types clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "Sparrow needs Python 3.11 or newer, $(PYTHON) is %d.%d: make setup PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(BIN)/pip install -c .venv/constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/tune run --nproc_per_node 2 sparrow_grpo --config tiny resume=auto

test: lint types
	$(BIN)/pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# A type checker does not follow package_dir, nor the import hook of an editable install: links show it the installed tree.
types: setup
	rm -rf build/types
	mkdir -p build/types/sparrow
	ln -s $(CURDIR)/sparrow/* $(CURDIR)/components $(CURDIR)/recipes build/types/sparrow
	cd build/types && ../../$(BIN)/mypy --config-file ../../setup.cfg --cache-dir ../mypy -p sparrow

clean:
	rm -rf .venv build *.egg-info recipes/*.egg-info
