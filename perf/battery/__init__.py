"""All that shows the kernels to be right on a GPU, by one command and in one table: `python -m perf.battery`.

`sections` says what is run, `running` runs it, many processes at a time, and reads what they say, `tables` is what is
printed and what docs/reliability.md shows.
"""
