"""Learning: in service, kernels of one bit class are timed aside, and calls run on the fastest from then on.

`tuner` counts calls, `statistics` says which products are worth a trial, `candidates` what is timed, `trial` goes
from step to step, in operands of its own (`block`), `halving` decides. docs/tuning.md is about its use. All is imported
by the first rule that learns.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from ..runtime import turns

if TYPE_CHECKING:
    from .tuner import Tuner


def _make() -> Tuner:
    from .tuner import Tuner

    made, process = Tuner(), os.getpid()
    atexit.register(lambda: made.finish() if os.getpid() == process else None)  # a forked child has no thread of it
    return made


turns.make = _make
