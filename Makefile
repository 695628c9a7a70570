PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Freed buffers stay with the process: on many machines fresh memory costs more than the arithmetic on it.
export MALLOC_MMAP_THRESHOLD_ ?= 100000000000
export MALLOC_TRIM_THRESHOLD_ ?= 100000000000
PROMPT ?= A train travels 60 km in 45 minutes. What is its speed in km per hour? Think step by step.

.PHONY: setup generate test docs browser exactness decoding-speed benchmark study quality style versions import-time \
	first-paint screenshots peer-training peer-engines golden clean

# One command from a fresh clone to assisted text: environment, target model, answer, comparison.
generate: setup
	$(BIN)/lilicorr generate "$(PROMPT)"

test: setup quality docs
	$(BIN)/lilicorr fetch-target smollm2-135m
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile

# Tests of the page drive a real browser and are skipped where there is none. This installs Debian's.
browser:
	command -v chromium || { apt-get update -qq && apt-get install -qq -y chromium; }

setup: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

style: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel is what gets type-checked: there every folder has the name it is imported by.
quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && $(BIN)/python -m pip install --quiet --no-deps --target build/types .
	@! ls build/types | grep -v -e '^bin$$' -e '^lilicorr_hf' || { echo "the wheel owns more than lilicorr_hf"; exit 1; }
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p lilicorr_hf

# The manual as pages in build/docs, with a reference from docstrings; any warning is an error, no network needed.
docs: quality
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# A batch of eight against eight single runs, and our decoding loop against transformers'; alternating runs.
decoding-speed: setup
	$(BIN)/python tests/support/decoding_speed.py

# The tables and pictures of docs/benchmarks.md, from the JSONL files in the folder DATA, in about MINUTES. Stopped, the
# same command goes on; numbers lie in runs/benchmark, to be removed when the weights have changed.
DATA ?= data
MINUTES ?= 60
FEW := $(addprefix $(DATA)/,gsm8k.jsonl humaneval.jsonl mtbench.jsonl)
BENCH := $(BIN)/lilicorr bench --page docs/benchmarks.md
# Output and share of the minutes, in percent.
run = $(BENCH) --output runs/benchmark/$(1).json --minutes $$(( $(MINUTES) * $(2) / 100 ))
VARIANTS := lilicorr argmax lilicorr:walk=viterbi lilicorr:k=4 lilicorr:k=2 lilicorr:block=6 lilicorr:block=4
LONG := lilicorr lilicorr:yarn=1024 lilicorr:context_window=1024 argmax
SMALL := lilicorr-tree lilicorr ddtree argmax
LARGE := lilicorr argmax lilicorr-tree:nodes=32 ddtree:nodes=32
OTHERS := transformers-dflash prompt-lookup
benchmark: setup
	$(call run,greedy,24) $(addprefix --system ,$(SMALL) $(OTHERS)) --limit 20 $(FEW)
	$(call run,bf16,15) $(addprefix --system ,$(SMALL) $(OTHERS)) --limit 20 --dtype bfloat16 $(FEW)
	LILICORR_PACK=0 $(call run,unpacked,8) $(addprefix --system ,lilicorr-tree lilicorr $(OTHERS)) --limit 5 $(FEW)
	$(call run,trees,11) $(addprefix --system ,$(LARGE) lilicorr-tree lilicorr-tree:adaptive_draft=true) --limit 10 $(FEW)
	$(call run,sets,16) $(addprefix --system ,$(LARGE)) --limit 10 --batch-sizes 10 --dtype bfloat16 $(DATA)
	$(call run,sampling,7) --temperatures 1 $(addprefix --system ,$(SMALL)) --system lilicorr:sampled_walk=true $(FEW)
	$(call run,concurrency,5) $(addprefix --system ,$(SMALL)) --batch-sizes 1,2,4,8,16,32 --limit 64 \
		--full-length --max-new-tokens 64 $(FEW)
	$(call run,lengths,7) $(addprefix --system ,$(LONG)) --lengths 512,1024,2048,4096,7168 --full-length \
		--max-new-tokens 64 $(DATA)/specbench.jsonl
	$(call run,ablations,7) $(addprefix --system ,$(VARIANTS)) $(FEW)

# The tables and pictures of docs/study.md: draft methods trained on ANSWERS, three quarters of an hour of a core each,
# and measured on DATA. Stopped, the same command goes on; what it has lies in runs/methods and runs/study.
ANSWERS ?= answers.jsonl
METHODS := runs/methods
TREES := --system lilicorr-tree:path=$(METHODS)/lilicorr --system ddtree:path=$(METHODS)/dflash
DRAWN := --system checkpoint:path=$(METHODS)/dspark,sampled_walk=true
BATCHES := --batch-sizes 1,4,16 --limit 16
UNSEEN := $(addprefix training/configs/studies/,languages.jsonl law.jsonl)
LENGTHS := --lengths 512,2048 --limit 6
SHORT := --full-length --max-new-tokens 64
compare = $(BIN)/lilicorr study methods --output_dir $(METHODS) --train_files $(ANSWERS) --parts 3 --jobs 2 \
	--page docs/study.md --bench "--output runs/study/$(1).json $(2)"
study: setup
	$(call compare,taus,--limit 20 --batch-sizes 10 --max-new-tokens 80 --dtype bfloat16 $(TREES) $(FEW))
	$(call compare,speed,--limit 6 $(FEW))
	$(call compare,sampling,--temperatures 1 --seeds 42 --limit 4 $(DRAWN) $(FEW))
	$(call compare,concurrency,$(BATCHES) --dtype bfloat16 $(SHORT) $(DATA)/specbench.jsonl)
	$(call compare,unseen,--batch-sizes 8 --max-new-tokens 80 --dtype bfloat16 $(UNSEEN))
	$(call compare,long,$(LENGTHS) $(SHORT) $(DATA)/specbench.jsonl)

# N random combinations of targets, drafters and arguments: assisted tokens against plain ones.
N ?= 200
exactness: setup
	EXACTNESS_CASES=$(N) $(BIN)/python -m pytest -q tests/exactness

# The decoding tests on each of these versions of transformers.
VERSIONS ?= 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0
versions: setup
	$(BIN)/python tests/support/versions.py $(VERSIONS)

# Seconds that importing lilicorr_hf adds to importing transformers' generation; median of 7 alternating runs.
import-time: setup
	$(BIN)/python tests/support/import_time.py

# Our training steps against nvidia-modelopt's, in turns on one core, each in its own environment. PEER holds options.
peer-training: runs/peer_rows.jsonl
	$(BIN)/python tests/peers/training_speed.py --rows $< --json runs/peer_training.json $(PEER)

runs/peer_rows.jsonl: tests/peers/prompts.jsonl | setup
	$(BIN)/lilicorr regenerate --target smollm2-135m --dataset $< --output $@ --max_new_tokens 256

# Whether nvidia-modelopt, SGLang, vLLM and transformers' own DFlash compute on our exports what we compute: a table.
peer-engines: setup
	PYTHONPATH=tests/support $(BIN)/python tests/peers/engines.py $(PEER)

# What nvidia-modelopt drafts with the shipped weights; to be recorded anew, and committed, whenever they change.
golden: setup
	$(BIN)/python tests/peers/record_blocks.py tests/golden/smollm2_shipped.safetensors $(PEER)

# Seconds until the page shows its lattice without a model, from an empty cache.
first-paint: setup browser
	$(BIN)/python tests/support/first_paint.py

# The README's pictures of the page.
screenshots: setup browser
	$(BIN)/python tests/support/screenshots.py docs/images

clean:
	rm -rf $(VENV) build *.egg-info
