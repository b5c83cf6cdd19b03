"""Plain `pytest` runs the interpreter's tests too, in the process of their own that they need.

`make test` leaves this file out: it starts that process itself.
"""

import os

import pytest

from tests.support.processes import python


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interpreter_group(pytestconfig: pytest.Config) -> None:
    tier = f"--tier={pytestconfig.getoption('tier')}"
    command = ["-m", "pytest", "tests/interpreter", tier, "-q", "-n", "2"]
    variables = dict.fromkeys(name for name in os.environ if name.startswith("PYTEST_"))
    done = python(*command, timeout=1800, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", **variables)
    if done.returncode:
        pytest.fail(f"TRITON_INTERPRET=1 python {' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)
