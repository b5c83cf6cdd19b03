"""`python -m perf.pages`: rewrites the pages and draws the plots from `results`, the committed records.

`blocks` are the parts of README.md and docs/ by name; `gpt_tables` shows what examples/bench_gpt.py measured,
`summary` is README's table of where we are faster and slower, `rung_diff` what each rung changes.
"""
