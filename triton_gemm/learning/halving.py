"""Which candidate is sampled next, and which wins: successive halving (Jamieson and Talwalkar, AISTATS 2016) of a few
candidates by noisy samples. Pure logic.

All that are left take turns, round by round, and are compared with the incumbent within rounds: the GPU's clock
differs from one place in a service to another. The model's predictions count as a sample or two. The incumbent stays to
the end, and is replaced only by a gain beyond noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import fmean, median

from ..tuning.trials import middle

MOST = 8  # candidates, with the incumbent
FEW = 3  # of them in a product's first trial: loading modules takes longest, and other products wait for theirs
STAGES = ((8, 2), (4, 4))  # how many are left, at most, and rounds of theirs
FINAL_ROUNDS = (6, 12, 24, 48)  # rounds of the last two after each of which the faster is chosen, if it is clear
FINAL_ROUNDS_OF_FEW = FINAL_ROUNDS[:2]
SLOW = 1.5  # times the incumbent: who is slower at once is sampled no more
CONFIDENCE = 2.5  # standard deviations of a gain
LEAST_GAIN = 0.003
OF_MODEL, NOISE = 0.1, 0.05  # standard deviations: of a predicted ratio, and of one sample


@dataclass
class Halving:
    """The rounds of one trial."""

    predicted: Sequence[float]  # each candidate's time over the incumbent's, which is the first
    final_rounds: Sequence[int] = FINAL_ROUNDS  # as FINAL
    rest: Callable[[], object] = lambda: None  # called now and then while there is much to compute
    samples: list[list[float]] = field(init=False)  # logarithms of microseconds, one a round
    left: list[int] = field(init=False)  # which are still sampled, the incumbent first
    winner: int | None = None  # once it is over

    def __post_init__(self) -> None:
        self.samples = [[] for _ in self.predicted]
        self.left = list(range(len(self.predicted)))
        self._settle()

    def next(self) -> int:
        """Whose sample is wanted. Every other round runs backwards, so that none always follows another."""
        done = min(len(self.samples[i]) for i in self.left)
        order = self.left if done % 2 == 0 else self.left[::-1]
        return next(i for i in order if len(self.samples[i]) == done)

    def add(self, which: int, us: float) -> None:
        self.samples[which].append(log(us))
        if which and self.samples[which][0] > self.samples[0][0] + log(SLOW):
            return self.drop(which)
        self._settle()

    def drop(self, which: int) -> None:
        """It cannot be sampled any more."""
        if which in self.left and which != 0:
            self.left.remove(which)
        self._settle()

    def gain(self, which: int, first: int = 0) -> tuple[float, float]:
        """By how much it is faster than the incumbent, as a share, and one standard deviation of that, from the round
        `first` on. The noise of a round is that of all candidates: a few samples of one say too little of it."""
        self.rest()
        differences = self._differences(which)[first:]
        rows = [row for row in map(self._differences, range(1, len(self.samples))) if len(row) > 1]
        squares = sum((x - fmean(row)) ** 2 for row in rows for x in row)
        noise = sqrt(squares / max(1, sum(len(row) - 1 for row in rows)))
        return -middle(differences), noise / sqrt(len(differences))

    def _differences(self, which: int) -> list[float]:
        return [x - y for x, y in zip(self.samples[which], self.samples[0], strict=False)]

    def us(self, which: int) -> float:
        return exp(median(self.samples[which]))

    def _place(self, which: int) -> float:
        """Of its time over the incumbent's the likeliest logarithm, by samples and the model's prediction."""
        count = len(self.samples[which])
        if which == 0 or not count:
            return log(self.predicted[which])
        gain, _ = self.gain(which)
        weight = 2 * NOISE**2 / count / OF_MODEL**2
        return (weight * log(self.predicted[which]) - gain) / (1 + weight)

    def _settle(self) -> None:
        """Drops the slower half where a stage has ended, and decides at the end: by the rounds of the final alone, as
        those before have chosen who is in it."""
        if self.winner is not None:
            return
        if len(self.left) == 1:
            self.winner = 0
            return
        rounds = min(len(self.samples[i]) for i in self.left)
        if any(len(self.samples[i]) != rounds for i in self.left):
            return
        ends = [sum(count for _, count in STAGES[: i + 1]) for i in range(len(STAGES))]
        if rounds in ends:
            left = [*[most for most, _ in STAGES[1:]], 2][ends.index(rounds)]
            self.left = [0, *sorted(sorted(self.left[1:], key=self._place)[: left - 1])]
        elif rounds - ends[-1] in self.final_rounds:
            gain, unsure = self.gain(self.left[1], ends[-1])
            if gain - CONFIDENCE * unsure > LEAST_GAIN:
                self.winner = self.left[1]
            elif gain + CONFIDENCE * unsure < LEAST_GAIN or rounds - ends[-1] == self.final_rounds[-1]:
                self.winner = 0
