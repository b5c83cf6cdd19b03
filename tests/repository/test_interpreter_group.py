"""Plain `pytest` runs the interpreter's tests too, in the process of their own that they need.

`make test` leaves this file out: it starts that process itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interpreter_group(pytestconfig: pytest.Config) -> None:
    tier = f"--tier={pytestconfig.getoption('tier')}"
    command = [sys.executable, "-m", "pytest", "tests/interpreter", tier, "-q", "-n", "2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"TRITON_INTERPRET=1 {' '.join(command[1:])}\n{done.stdout}{done.stderr}", pytrace=False)
