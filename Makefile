# make run       installs into .venv, then trains the demo: 2 ranks, partial colocation; on one GPU: 1, full
# make test      installs into .venv, then lints and passes the tests of the default tier, on the CPU
# make test-all  the same, then the slow tests; make test-long: chaos and machines, only by hand
# make papers    installs, then simulates the papers' figures, two at a time, for docs/papers: 8 to 20 minutes
# make results   installs, then measures README's results and draws its pictures: about 20 minutes
# make walkthrough  installs, then runs the demo's first steps and writes docs/walkthrough.md: a minute
# make test-gpu  installs into .venv, then tests what needs a GPU; prints a table of what passed.
#                PART=trainer (3 minutes), engine, demo, ranks: only that; PYTHON=python3: without .venv
PYTHON ?= python3
BIN := .venv/bin
GPUS := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c '^GPU')
RANKS ?= $(if $(filter 1,$(GPUS)),1,2)
MODE ?= $(if $(filter 1,$(RANKS)),full,partial)
# torchrun's own store would listen on every interface: use a new file per run; ranks meet on their own
TORCHRUN := TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 $(BIN)/python examples/quiet_torchrun.py --rdzv-backend c10d --rdzv-conf store_type=file \
  --rdzv-endpoint "$$(mktemp)" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2
export OMP_NUM_THREADS ?= 1
# seconds that ranks have to save and exit after the first Ctrl-C before torchrun kills them
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 300

.PHONY: run test test-all test-long test-gpu lint install papers results walkthrough
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q
# a test that hangs for longer than LIMIT_S of tests/support/patience.py ends its stream, which prints where
STREAMS := $(PYTEST) -n 2 --no-loadscope-reorder --max-worker-restart 0 \
  -o faulthandler_timeout=$$((2400 * $${NANOYATT_TEST_PATIENCE:-1})) -o faulthandler_exit_on_timeout=true
run: install
	$(TORCHRUN) --nproc-per-node $(RANKS) run.py --mode $(MODE) $(ARGS)

test: install lint
	$(STREAMS) -m "not slow and not long and not gpu" tests

test-all: test
	$(STREAMS) -m slow tests

test-long: install
	$(PYTEST) -m long tests

# your own PYTHON must have all packages: nothing is installed into it
test-gpu: $(if $(findstring file,$(origin PYTHON)),install)
	$(if $(findstring file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m pytest -q \
	  -m '$(if $(PART),gpu(part="$(PART)"),gpu)' tests/test_gpu.py $(ARGS)

papers: install
	printf '%s --write\n' reproduce/papers/hybridflow.py reproduce/papers/wechat_yatt.py reproduce/papers/rlhfuse.py reproduce/bench/central.py reproduce/papers/measured.py reproduce/bench/sensitivity.py \
	  | xargs -P 2 -L 1 $(BIN)/python
	$(BIN)/python reproduce/papers/pages.py

results: install
	$(BIN)/python reproduce/bench/results.py

walkthrough: install
	$(BIN)/python reproduce/bench/walkthrough.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: .venv/installed

.venv/installed: requirements.txt cpu/requirements.txt
	$(PYTHON) runtime/supported.py $(GPUS)
	$(PYTHON) -m venv .venv
ifneq ($(filter-out 0,$(GPUS)),)
	$(BIN)/pip install --quiet -r requirements.txt
else
	$(BIN)/pip install --quiet -r cpu/requirements.txt
	$(BIN)/pip install --quiet --no-deps -c requirements.txt sglang compressed-tensors==0.18.0 xgrammar==0.2.7
endif
	touch $@
