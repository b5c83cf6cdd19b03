"""`python -m perf.pages`: rewrites the pages and draws the plots from `results`, the committed records.

`blocks` are the parts of README.md and docs/ by name; `gpt_tables` shows what examples/bench_gpt.py measured,
`summary` has the tables of our speed beside torch's, `rung_diff` what each rung changes.
"""
