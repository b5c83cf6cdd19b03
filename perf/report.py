"""`python perf/report.py`, from any folder: the command of `perf.ladder.report`."""

import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # compiled here; the interpreter gets a process of its own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

try:
    from perf.ladder.report import main
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]', or `make report`, which installs what it needs")

if __name__ == "__main__":
    sys.exit(main())
