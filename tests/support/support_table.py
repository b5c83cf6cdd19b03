"""What is supported: the operations and aspects that test_support.py goes through, and docs/use.md's table of them.

`python -m tests.support.support_table` writes that table.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/use.md"
BEGIN, END = "<!-- support -->\n", "<!-- end of support -->"

ASPECTS = (
    *("fp32", "fp16, bf16", "fp64", "int8", "fp8", "any strides", "empty", "`out=`", "`out_dtype=`", "`precision=`"),
    *("`activation=`", "gradients", "double backward", "`torch.vmap`", "`torch.compile`", "`torch.export`"),
    *("`torch.autocast`", "through `use()`"),
)

# What an operation does not take, or does not do.
NOT: dict[str, frozenset[str]] = {
    "matmul": frozenset({"fp8", "`out_dtype=`", "`activation=`"}),
    "mm": frozenset({"fp8", "`activation=`"}),
    "bmm": frozenset({"fp8", "`activation=`"}),
    "mv": frozenset({"fp8", "`out_dtype=`", "`activation=`", "through `use()`"}),
    "addmm": frozenset({"int8", "fp8"}),
    "baddbmm": frozenset({"int8", "fp8"}),
    "linear": frozenset({"int8", "fp8", "`out=`", "`out_dtype=`"}),
    "linear, residual": frozenset({"int8", "fp8", "`out=`", "`out_dtype=`", "through `use()`"}),
    "linear, gate": frozenset({"int8", "fp8", "`out=`", "`out_dtype=`", "through `use()`"}),
    "nn.Linear": frozenset({"int8", "fp8", "`out=`", "`out_dtype=`"}),
    "grouped_matmul": frozenset({"int8", "fp8", "`out=`", "`torch.autocast`", "through `use()`"}),
    "grouped_matmul, gate": frozenset({"int8", "fp8", "`out=`", "`torch.autocast`", "through `use()`"}),
    "scaled_matmul": frozenset(
        {
            *("fp32", "fp16, bf16", "fp64", "`out=`", "`precision=`", "gradients", "double backward"),
            "through `use()`",
        }
    ),
}
OPERATIONS = tuple(NOT)


def table() -> str:
    """Aspects down, operations across, in Markdown."""
    lines = [
        f"| | {' | '.join(f'`{operation}`' for operation in OPERATIONS)} |",
        f"|---|{':-:|' * len(OPERATIONS)}",
        *(
            f"| {aspect} | {' | '.join('' if aspect in NOT[operation] else '✓' for operation in OPERATIONS)} |"
            for aspect in ASPECTS
        ),
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its table made anew."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
