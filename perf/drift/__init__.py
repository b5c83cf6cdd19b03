"""What another Triton makes of the kernels: registers, spills, shared memory and instructions, against a record.

`cases` lists the kernels in all their configurations, `compiling` compiles them without a GPU, `record` keeps and
compares what came of it, and `tritons` finds or installs the versions.
"""
