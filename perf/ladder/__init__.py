"""The ladder measured: every rung, its CUDA twin and cuBLAS. `report` is the command, run as `perf/report.py`.

- To measure: `tasks` adds to a `record`; `rungs_and_twins` are the providers, `published` the experiments that they
  retell. Without a GPU `static` compiles, `clock_model` counts bytes, `interpret` runs Triton's interpreter.
- To show: `views` and `autotuner` read a record; `tables`, `plots`, `curves` and `report_page` are made of that.
- `explorer`: the page to play with, of `clock_model`, a record and the table that `compiled` writes.
- `picker`: the page on which a reader guesses the fastest candidate, of the records of `perf.tuning`.
- `by_hand`: runs one rung for `python -m triton_gemm.ladder`. `counters`: what Nsight Compute counts.
"""
