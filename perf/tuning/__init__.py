"""`python -m perf.tuning`: what the model's choices lose, what `tune` finds, and whether it finds the same again."""
