"""Fixtures of the tuner's tests."""

from tests.support.lab_fakes import no_gpu as no_gpu
from tests.support.lab_fakes import tuned_on_the_cpu as tuned_on_the_cpu
