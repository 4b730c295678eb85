# Large Model Training, Executed. `make help` lists what can be made.

PYTHON ?= python3.11
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/ready
NOTEBOOKS = $(wildcard notebooks/[0-9]*.ipynb)

.DEFAULT_GOAL := help
.PHONY: help book serve test lint lab notebooks bench clean

help:  ## list these commands
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)

$(READY): requirements.txt pyproject.toml tools/setup.sh
	@tools/setup.sh $(PYTHON)
	@touch $@

book: $(READY)  ## build the book from the stored outputs, warnings are errors
	@$(BIN)/python tools/book.py

serve: book  ## serve the built book on a free local port
	@$(BIN)/python tools/serve.py

test: lint book  ## prove it: lint, types, unit tests, notebooks, pages
	@$(BIN)/python -m pytest tests $(NOTEBOOKS) -q -n $(WORKERS) --dist loadfile \
		--nbval --nbval-current-env --nbval-cell-timeout=120 \
		--nbval-sanitize-with=tests/nbval.cfg

lint: $(READY)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

lab: $(READY)  ## open the notebooks in Jupyter Lab
	@$(BIN)/jupyter trust $(NOTEBOOKS) >/dev/null  # figures show before they are run again
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: $(READY)  ## run again the notebooks that changed (ALL=1: all of them)
	@$(BIN)/python tools/notebooks.py $(if $(ALL),--all)

bench: $(READY)  ## our figures beside a peer's, one JSON line each
	@for f in benchmarks/*.py; do echo "$$f"; KINETO_LOG_LEVEL=99 $(BIN)/python $$f || exit 1; done

clean:  ## remove what was built (the environment too: make clean ENV=1)
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -path ./.venv -prune -o -name __pycache__ -print0 | xargs -0 rm -rf
	@$(if $(ENV),rm -rf .venv)
