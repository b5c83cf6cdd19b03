"""`python -m perf.calibrate`: measures what the cost model predicts, and fits its constants."""
