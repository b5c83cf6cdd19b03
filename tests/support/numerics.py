"""The bound and the truth that results are held to; perf measures with the same."""

from perf.measure.numerics import error_bound, mode_of, reference, scale_shapes, scaled

__all__ = ["error_bound", "mode_of", "reference", "scale_shapes", "scaled"]
