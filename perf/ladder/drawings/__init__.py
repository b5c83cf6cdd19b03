"""What docs/ladder.md draws of each rung: traces of the kernels, replayed on a clock where time is shown."""
