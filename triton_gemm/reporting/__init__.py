"""Reports: which kernel a GEMM runs on and why, all candidates, a hash of what decides choices, what works here."""
