"""What the contracts in pyproject.toml (`lint-imports`) cannot say: a rung imports lower rungs alone."""

from __future__ import annotations

import grimp

RUNG = "triton_gemm.ladder.rung"


def violations(graph: grimp.ImportGraph) -> list[str]:
    """What a rung imports of the ladder beside `rung` and lower rungs; modules are named kNN, so that names sort."""
    ladder = graph.find_children("triton_gemm.ladder")
    return [
        f"{module} imports {imported}"
        for module in sorted(one for one in ladder if one.startswith("triton_gemm.ladder.k"))
        for imported in sorted(graph.find_modules_directly_imported_by(module) & {*ladder, "triton_gemm.ladder"})
        if imported != RUNG and not "triton_gemm.ladder.k" < imported < module
    ]


def test_a_rung_imports_lower_rungs_alone() -> None:
    graph = grimp.build_graph("triton_gemm", cache_dir=None)
    assert not violations(graph)
    graph.add_import(importer="triton_gemm.ladder.k03_blocked", imported="triton_gemm.ladder.k04_grouped")
    graph.add_import(importer="triton_gemm.ladder.k05_register_tiled", imported="triton_gemm.ladder.command")
    assert len(violations(graph)) == 2
