# Every command of this project; `make help` lists them.
#
#   PYTHON=python3.12   the interpreter that the environment is made with
#   CONSTRAINTS=newest  the versions of constraints-newest.txt instead of constraints.txt, in an environment of their
#                       own, .venv-newest, so that both live side by side; or oldest, or a file. With CUDA: gigabytes
#   VENV=.venv          where the environment is; VENV=none uses the one that is active and installs nothing. So does
#                       `make explore` by itself, if another environment is active and none of the above is given
#   ARGS=...            passed on to the report, the bench or pytest
#   JOBS=auto           test processes
#   VERSION=0.2.0       what `make release` cuts before it builds
#   GPU_JOBS=8          test processes that share the GPU
#   MINUTES=10          how long `make gpu-fuzz` draws products

PYTHON ?= python3
CONSTRAINTS ?=
JOBS ?= auto
GPU_JOBS ?= 8
TIMED := tests/gpu/tuning tests/gpu/calibration tests/gpu/learning tests/gpu/perf/test_bench_gpu.py tests/gpu/repository/test_snippets_gpu.py  # need the GPU for themselves
MINUTES ?= 10
ARGS ?=
VERSION ?=

# newest -> constraints-newest.txt and -newest; my/pins.txt -> my/pins.txt and -pins
VERSIONS := $(or $(wildcard constraints$(addprefix -,$(CONSTRAINTS)).txt),$(wildcard $(CONSTRAINTS)))
KIND := $(addprefix -,$(basename $(notdir $(CONSTRAINTS))))
ifeq ($(VERSIONS),)
  $(error CONSTRAINTS=$(CONSTRAINTS): there is neither constraints-$(CONSTRAINTS).txt nor such a file)
endif

# Three pages need nothing of gigabytes: whoever has activated an environment has installed what they want already.
ifeq ($(MAKECMDGOALS)|$(origin VENV)|$(origin PYTHON)|$(CONSTRAINTS),explore|undefined|file|)
  ifneq ($(filter-out $(realpath .venv),$(realpath $(VIRTUAL_ENV))),)
    VENV := none
    $(info ==> using the active environment, $(VIRTUAL_ENV); make explore VENV=.venv would make one)
  endif
endif
VENV ?= .venv$(KIND)
RESULTS := build/test-results$(KIND)

# The checkout is importable as it stands, installed or not.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PYTHONUNBUFFERED := 1

ifeq ($(VENV),none)
  ifneq ($(CONSTRAINTS),)
    $(error VENV=none installs nothing, so that CONSTRAINTS=$(CONSTRAINTS) would be ignored)
  endif
  PY := $(PYTHON)
  BIN :=
  READY :=
else
  PY := $(VENV)/bin/python
  BIN := $(VENV)/bin/
  READY := $(VENV)/.complete
  # An environment is made again when its interpreter is gone or is not the one asked for, or pip was killed in it.
  identify = $(shell $(1) -c 'import sys; print(sys.version.split()[0], "in", sys.base_prefix)' 2>/dev/null)
  ifneq ($(wildcard $(READY)),)
    made_with := $(call identify,$(PY))
    asked_for := $(if $(filter file,$(origin PYTHON)),$(made_with),$(call identify,$(PYTHON)))
    ifneq ($(made_with),$(or $(asked_for),none))
      REMAKE := $(READY)
    endif
    ifneq ($(wildcard $(VENV)/.changing),)
      REMAKE := $(READY)
    endif
    ifneq ($(shell cat '$(READY)'),$(VERSIONS))
      OTHER_VERSIONS := $(READY)
    endif
  endif
endif

.PHONY: help report bench explore docs test test-all gpu-test gpu-fuzz gpu-battery kit check format release clean $(REMAKE) $(OTHER_VERSIONS)
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@echo 'usage: make COMMAND [ARGS=...] [PYTHON=python3] [CONSTRAINTS=newest] [VENV=.venv | VENV=none] [JOBS=auto]'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r name text; do printf '  %-10s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'CONSTRAINTS=newest takes the torch and Triton of constraints-newest.txt, in an environment of their own,'
	@echo '.venv-newest (gigabytes, CUDA included); so does oldest; a file of yours works too.'

# ---- the environment ------------------------------------------------------------------------------
# One make at a time works on it, where there is flock.
# .complete says that everything is installed, and names the file of versions; it is older than pyproject.toml, or
# names another file, when the environment has to be brought up to date. .changing is there while pip works: whoever
# finds it knows that pip was killed, does not trust the environment and makes it from nothing. A folder that make did
# not make is never deleted.

$(VENV)/.complete: pyproject.toml $(VERSIONS) constraints-tools.txt
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "error: there is no '$(PYTHON)' here; name an interpreter with PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or later is needed and '$(PYTHON)' is older; name another with PYTHON=..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments (no venv or ensurepip module)." >&2; \
	  echo "       On Debian and Ubuntu: apt install python3-venv. Or name another interpreter with PYTHON=...," >&2; \
	  echo "       or use an environment that is already active: make VENV=none ..." >&2; exit 1; }
	@set -e; mkdir -p '$(dir $(VENV))'; \
	if command -v flock >/dev/null; then \
	  exec 9>'$(VENV).lock'; \
	  flock -n 9 || { echo "==> waiting for another make that works on '$(VENV)'"; flock 9; }; \
	  if [ -z '$(REMAKE)' ] && [ -f '$@' ] && [ "$$(cat '$@')" = '$(VERSIONS)' ] && \
	     [ -z "$$(find $^ -newer '$@')" ]; then exit 0; fi; \
	fi; \
	rm -rf '$(VENV).discarded'; \
	if [ ! -f '$@' ] || [ -n '$(REMAKE)' ]; then \
	  if [ -d '$(VENV)' ] && ! rmdir '$(VENV)' 2>/dev/null; then \
	    if [ ! -f '$(VENV)/.made-by-make' ]; then \
	      echo "error: '$(VENV)' exists and make did not make it. Remove it, choose another place (VENV=...)," >&2; \
	      echo "       or activate it and use it as it is: make VENV=none ..." >&2; exit 1; \
	    fi; \
	    mv '$(VENV)' '$(VENV).discarded'; rm -rf '$(VENV).discarded'; \
	  fi; \
	  echo "==> making the environment '$(VENV)' with $$('$(PYTHON)' --version)"; \
	  mkdir -p '$(VENV)'; : >'$(VENV)/.made-by-make'; \
	  '$(PYTHON)' -m venv '$(VENV)'; \
	fi; \
	echo "==> installing triton_gemm[dev,docs] as $(VERSIONS) says (the first time takes minutes)"; \
	: >'$(VENV)/.changing'; \
	'$(PY)' -m pip install --disable-pip-version-check --no-input -e '.[dev,docs]' -c '$(VERSIONS)' || { \
	  rm -f '$(VENV)/.changing'; \
	  echo "error: the installation failed; what pip said is above. The next make tries it again." >&2; exit 1; }; \
	echo '$(VERSIONS)' >'$@'; rm -f '$(VENV)/.changing'

# $(call need,MODULES): with VENV=none nothing is installed, so what is missing is named.
ifeq ($(VENV),none)
define need
@'$(PY)' -c 'import importlib.util, sys; \
  missing = [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]; \
  missing and sys.exit("error: VENV=none, and the active environment lacks: " + " ".join(missing))' $(1)
endef
endif

# ---- the commands ---------------------------------------------------------------------------------

report: $(READY) ## climb the ladder: measure and draw every rung, its CUDA twin and cuBLAS (ARGS=--quick)
	$(call need,torch triton matplotlib pandas rich)
	@'$(PY)' perf/report.py $(ARGS)

bench: $(READY) ## measure suites of shapes against cuBLAS, on a GPU (ARGS='square mid --limit 5')
	$(call need,torch triton numpy rich)
	@'$(PY)' -m perf.bench $(or $(ARGS),all)

explore: $(READY) ## write three pages to play with: what tiles cost on six GPUs, what kernels do in time, a guess against the cost model
	$(call need,torch triton numpy rich matplotlib)
	@echo '==> page 1 of 3: computing what tiles cost on six GPUs'
	@'$(PY)' -m perf.ladder.explorer $(ARGS)
	@echo '==> page 2 of 3: collecting GEMMs to guess the fastest kernel of'
	@'$(PY)' -m perf.ladder.picker
	@echo '==> page 3 of 3: compiling and interpreting kernels of the ladder, to play what they do'
	@'$(PY)' -m perf.ladder.player

# The interpreter is chosen when triton is imported, so its tests run in processes of their own.
# With ARGS (-k, -m) a group may have nothing to run; without, that is an error.
# Both tiers find every planted bug; tests/support/tiers.py says what the fast one leaves out.
TIER := fast
test: ## the fast tier of the tests that need no GPU, about half an hour (ARGS='-k matmul')
test-all: ## every test that needs no GPU
test-all: TIER := full
test test-all: $(READY)
	$(call need,torch triton numpy matplotlib rich hypothesis pytest xdist pytest_timeout setuptools typer)
	@mkdir -p $(RESULTS); rm -f $(RESULTS)/interpreter.xml $(RESULTS)/compile.xml
	@failed=; \
	group() { \
	  name=$$1; shift; echo; echo "==> tests: $$name"; \
	  "$$@" --tier=$(TIER) -n $(JOBS) --maxprocesses=8 --dist=worksteal --durations=5 --junit-xml=$(RESULTS)/$$name.xml $(ARGS); \
	  case $$? in 0$(if $(ARGS),|5)) ;; *) failed="$$failed $$name" ;; esac; \
	}; \
	group interpreter env TRITON_INTERPRET=1 OMP_NUM_THREADS=1 '$(PY)' -m pytest tests/interpreter; \
	group compile env -u TRITON_INTERPRET OMP_NUM_THREADS=1 '$(PY)' -m pytest tests \
	  --ignore=tests/interpreter --ignore=tests/gpu --ignore=tests/repository/test_interpreter_group.py; \
	echo; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed. Results: $(RESULTS)/*.xml"; exit 1; fi; \
	echo "All tests passed. Results: $(RESULTS)/*.xml"

gpu-test: $(READY) ## the tests that need a CUDA device
	$(call need,torch triton numpy matplotlib rich hypothesis pytest xdist pytest_timeout setuptools)
	@'$(PY)' -c 'import sys, torch; torch.cuda.is_available() or sys.exit( \
	  f"error: gpu-test needs a CUDA device, and torch {torch.__version__} sees none here (does nvidia-smi?)")'
	@mkdir -p $(RESULTS); rm -f $(RESULTS)/gpu.xml
	@env -u TRITON_INTERPRET '$(PY)' -m pytest tests/gpu $(addprefix --ignore=,$(TIMED)) --tier=full -n $(GPU_JOBS) --durations=10 \
	  --junit-xml=$(RESULTS)/gpu.xml $(ARGS) || { echo "FAILED: gpu. Results: $(RESULTS)/gpu.xml"; exit 1; }
	@env -u TRITON_INTERPRET '$(PY)' -m pytest $(TIMED) --tier=full -n 0 --junit-xml=$(RESULTS)/gpu-timed.xml $(ARGS) || [ $$? = 5 ] \
	  || { echo "FAILED: gpu-timed. Results: $(RESULTS)/gpu-timed.xml"; exit 1; }
	@echo "All GPU tests passed. Results: $(RESULTS)/gpu.xml"

gpu-fuzz: $(READY) ## products drawn at random against fp64, on a GPU (MINUTES=10 ARGS='--seed 7')
	$(call need,torch triton numpy hypothesis)
	@env -u TRITON_INTERPRET '$(PY)' -m tests.fuzz --minutes $(MINUTES) $(ARGS)

gpu-battery: $(READY) ## all that shows the kernels to be right, on a GPU, in one table (ARGS='--only memcheck windows')
	$(call need,torch triton numpy rich hypothesis pytest xdist pytest_timeout setuptools)
	@env -u TRITON_INTERPRET '$(PY)' -m perf.battery $(ARGS)

kit: $(READY) ## triton_gemm/kits: machine code that need not be compiled, built without a GPU (ARGS='--served 2')
	$(call need,torch triton)
	@env -u TRITON_INTERPRET '$(PY)' -m perf.kit $(ARGS)

CUDA_SOURCES = find reference_cuda triton_gemm tests/native -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h'

check: $(READY) ## format, lint, types and layers; changes nothing
	$(call need,ruff mypy importlinter)
	@failed=; \
	step() { name=$$1; shift; echo "==> $$name"; "$$@" || failed="$$failed $$name"; }; \
	step ruff-format '$(PY)' -m ruff format --check --output-format=concise .; \
	step ruff-check '$(PY)' -m ruff check --output-format=concise .; \
	step clang-format sh -c "$(CUDA_SOURCES) | xargs -r '$(BIN)clang-format' --dry-run -Werror"; \
	step mypy '$(PY)' -m mypy; \
	step lint-imports '$(BIN)lint-imports' --no-cache --no-logo; \
	step choices env -u TRITON_INTERPRET '$(PY)' -m perf.choices --changes; \
	echo '==> kit'; env -u TRITON_INTERPRET '$(PY)' -m perf.kit --check || [ $$? = 1 ] || failed="$$failed kit"; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed. 'make format' mends formatting."; exit 1; fi; \
	echo "All checks passed."

docs: $(READY) ## build the site of these documents, in build/site; a warning is an error
	$(call need,sphinx myst_parser furo torch triton typer)
	@'$(PY)' -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: the site needs Python 3.11: PYTHON=...")'
	@rm -rf build/site
	@'$(PY)' -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -c docs -d build/site-cache . build/site $(ARGS)
	@'$(PY)' -m perf.ladder.explorer --out build/site/explorer.html
	@'$(PY)' -m perf.ladder.picker --out build/site/picker.html
	@'$(PY)' -m perf.ladder.player --out build/site/player.html
	@echo "The site: build/site/index.html"

format: $(READY) ## rewrite the sources as ruff and clang-format want them
	$(call need,ruff)
	@'$(PY)' -m ruff check --fix --quiet . || true
	@'$(PY)' -m ruff format .
	@$(CUDA_SOURCES) | xargs -r '$(BIN)clang-format' -i

release: $(READY) ## build the release that HEAD is, reproducibly; VERSION=0.2.0 cuts it first (docs/release.md)
	$(call need,build hatchling packaging)
	@'$(PY)' .ci/release.py $(VERSION)

clean: ## remove what was built, the caches and the environment; results in perf/ stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find triton_gemm reference_cuda perf examples tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	@rm -rf '$(VENV).discarded' '$(VENV).lock'; \
	if [ -f '$(VENV)/.made-by-make' ]; then mv '$(VENV)' '$(VENV).discarded'; rm -rf '$(VENV).discarded'; fi
