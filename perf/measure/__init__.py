"""How anything is measured.

`timer` times providers, after `operands` has checked their results against fp64; `numerics` has the bounds of error.
`providers`: cuBLAS and triton_gemm. `roofline`: what GPUs can reach. `environment`: what a figure was measured on.
"""
