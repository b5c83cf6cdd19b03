"""The bound and the truth that results are held to; perf measures with the same two."""

from perf.numerics import error_bound, reference

__all__ = ["error_bound", "reference"]
