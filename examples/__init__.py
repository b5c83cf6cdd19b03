"""Models in plain torch, which run on triton_gemm without an edit."""
