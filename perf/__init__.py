"""Everything that measures; `python -m perf` lists the commands.

- `measure`: the one timer, and what it needs to be right: operands, errors, providers, the environment.
- `ladder`: the rungs and their CUDA twins; `report.py` is its command. `bench`: `matmul` on suites of shapes.
- `accuracy`: how wrong every kernel is. `battery`: all that shows kernels to be right, in one table.
- `calibrate`: the constants of the cost model. `tuning`: what its choices lose. `drift`: what other Tritons make of the
  kernels.
- `pages`: results as Markdown. `common`: what the others share.
- `results`: what was measured, a folder for each GPU.
"""
