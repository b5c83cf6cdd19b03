"""`triton-gemm cache` of what was learned in service."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support import table_fakes
from tests.support.table_fakes import another, problem_of
from triton_gemm import tables
from triton_gemm.cli.app import app
from triton_gemm.hardware.gpus import named_device
from triton_gemm.selection.select import select
from triton_gemm.tables import learned

H200 = named_device("h200")


def call(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], input=answer, env={"COLUMNS": "200"})


@pytest.mark.usefixtures("default_policy")
def test_it_is_shown_and_forgotten_alone(folder: Path) -> None:
    problem = problem_of()
    table_fakes.store(problem_of(64))
    incumbent, how = select(problem, H200), {"us": 10.0, "before_us": 12.5, "samples": 18}
    assert learned.store(problem, another(problem), H200, before=incumbent, **how)  # type: ignore[arg-type]
    shown = call("show", "--device", "h200").output
    assert "learned in service from 18 samples: in place of " in shown and "25.0 %" in shown
    assert learned.store(problem, incumbent, H200, before=incumbent, us=9.0, before_us=9.0, samples=30)
    assert "from 30 samples: nothing was faster" in call("show", "--device", "h200").output
    assert "learned" in call("ls").output
    refused = call("clear", "--learned", answer="n\n")
    assert refused.exit_code == 1 and "Delete 1 table in" in refused.output and len(tables.listed()) == 2
    assert call("clear", "--learned", "--yes").exit_code == 0 and len(tables.listed()) == 1
    assert call("clear", "--learned", "--models").exit_code == 2
