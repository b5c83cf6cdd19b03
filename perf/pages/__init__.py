"""`python -m perf.pages`: rewrites the pages and draws the plots from `results`, the committed records.

`blocks` are the parts of README.md and docs/ by name; `gpt_tables` shows what examples/bench_gpt.py measured,
`summary` makes the tables that compare our speed with torch's and `speed_map` the picture of it, `rung_diff` shows what
each rung changes.
"""
