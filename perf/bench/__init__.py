"""`python -m perf.bench`: triton_gemm against cuBLAS and other peers on suites of shapes.

`suites` lists the `shapes`; `sweep` measures a suite with the providers of `peers`; `scores` compares it with targets;
`tables` and `plots` show it.
"""
