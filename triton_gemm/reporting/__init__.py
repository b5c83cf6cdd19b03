"""Reports: the kernel chosen for a GEMM and why, its candidates, a fingerprint of all choices, checks of the setup."""
