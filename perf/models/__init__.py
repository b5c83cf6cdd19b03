"""`python -m perf.models`: tokens a second of whole models of transformers, by torch and by triton_gemm.

`zoo` lists the models, `cases` says what each of them runs, `measuring` takes the rounds, `truth` the errors against
fp64, `first_minute` starts processes that have compiled nothing; `record` keeps what was found, `tables` shows it.
"""
