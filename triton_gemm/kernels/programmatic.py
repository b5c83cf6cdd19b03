"""Programmatic dependent launch (Hopper and later): a grid may be set up while the one before it runs out."""

import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(PDL: tl.constexpr):
    """Lets the next grid be set up, and waits for all that the one before wrote. Comes before the first access to
    memory. Without PDL a launch waits by itself."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
