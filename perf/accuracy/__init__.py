"""`python -m perf.accuracy`: how wrong every kernel is, in every precision and class of bits.

`inputs` are the matrices, `candidates` the kernels and classes that multiply them, `judge` compares with fp64, `tables`
is what is printed and what docs/accuracy.md shows.
"""
