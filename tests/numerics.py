"""The bound and the truth that results are held to; perf measures with the same."""

from perf.numerics import error_bound, mode_of, reference

__all__ = ["error_bound", "mode_of", "reference"]
