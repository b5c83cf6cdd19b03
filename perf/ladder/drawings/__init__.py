"""What the drawings in docs/drawings show: traces of the kernels, replayed on a clock where time is shown."""
