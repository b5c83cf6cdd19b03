"""Fits a GPU's model to the times of a few hundred candidates.

The figures' logarithms are estimated a posteriori. Before, they are normal around those of the model that the fit
begins with. The errors of predictions, logarithms of predicted over measured time, are normal too. An error has a part
that the candidates of a product share, and one of the candidate's own, which is what decides between them. Gauss and
Newton's method finds the maximum (Gelman et al., Bayesian Data Analysis, 13.2). Errors far out count less, as under
Student's t (Lange, Little and Taylor, JASA 84, 1989). What the model leaves out is most of an error, and not noise of
the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..hardware.device_model import DeviceModel
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..selection.select import predicted
from .figures import Place, concerns, places, value_at, with_values

# Standard deviations of errors: of a candidate's own, and of those that a product's candidates share.
OWN, SHARED = 0.1, 0.1
FREEDOM = 4.0  # degrees, of Student's t
# Standard deviations of figures' logarithms before: of the GPU's own figures and of the factor that is common
# to a family, and of each figure of a kernel.
COMMON, ALONE = 0.3, 0.1
SHIPPED = 0.3  # of these, where the model is of such a GPU: boards of one kind differ less
FAMILIES = ("step", "products")  # tables of one kind of figure for many tiles or precisions
ITERATIONS = 6
ENOUGH = 0.01  # a step that improves less, as a share, is the last
LEAST_STEP = 0.05
DIFFERENCE = 2e-3  # of a figure's logarithm, for slopes
FOLDS = 4


@dataclass(frozen=True)
class Timed:
    """A product, and microseconds of its candidates."""

    problem: GemmProblem
    us: Mapping[Candidate, float]


@dataclass(frozen=True)
class Score:
    """How good a model is."""

    misfit: float  # mean of the sum that a fit minimises, without the prior
    error: float  # root mean square of the logarithms of predicted over measured times
    regret: float  # how much longer the picks take than the fastest, as a share


@dataclass(frozen=True)
class Fitted:
    """What a fit gives."""

    model: DeviceModel  # that is most likely after the times
    before: Score  # how good the one before is
    after: Score  # How good models are for products that they were not fitted to: all but those of one fold in FOLDS


def fit(
    timed: Sequence[Timed], model: DeviceModel, width: float = 1.0, moves: Callable[[Place], bool] = lambda _: True
) -> Fitted:
    """The model that is most likely after these times, of all near `model`. width: of its figures, SHIPPED where they
    are known of such a GPU. moves: whether a figure may change; the others keep their values."""
    with torch.device("cpu"):  # whatever torch.set_default_device says
        return _fit(timed, model, width, [place for place in places(model.as_dict()) if moves(place)])


def _fit(timed: Sequence[Timed], model: DeviceModel, width: float, where: Sequence[Place]) -> Fitted:
    entry = model.as_dict()
    start = _logs([value_at(entry, place) for place in where])
    prior = torch.linalg.inv(width**2 * covariance(where))
    data = Data(timed)

    def at(x: torch.Tensor) -> DeviceModel:
        return DeviceModel(**with_values(entry, dict(zip(where, (start + x).exp().tolist(), strict=True))))

    def solved(slopes: torch.Tensor, residuals: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Gauss and Newton's step from x."""
        return -torch.linalg.solve(slopes.T @ slopes + prior, slopes.T @ residuals + prior @ x)

    def squares(errors: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> float:
        white = data.whitened(errors[:, None], weights)[:, 0]
        return float(white @ white + x @ prior @ x)

    x = torch.zeros_like(start)
    first = errors = data.errors(model)
    for _ in range(ITERATIONS):
        weights = data.weights(errors)
        slopes = data.whitened(data.slopes(at(x), where), weights)
        residuals = data.whitened(errors[:, None], weights)[:, 0]
        step, share, least = solved(slopes, residuals, x), 1.0, squares(errors, weights, x)
        while share > LEAST_STEP:
            found = data.errors(at(x + share * step))
            cost = squares(found, weights, x + share * step)
            if cost < least:
                break
            share /= 2
        else:
            break
        x, errors = x + share * step, found
        if least - cost < ENOUGH * least:
            break

    # Near the maximum one step without a fold's products leads to the maximum without them.
    unseen = torch.empty_like(errors)
    for fold in range(FOLDS):
        inside = data.of % FOLDS == fold
        others = torch.cat([~inside, torch.arange(data.count) % FOLDS != fold])
        rows = inside.nonzero()[:, 0].tolist()
        if rows:
            unseen[rows] = data.errors(at(x + solved(slopes[others], residuals[others], x)), rows)
    return Fitted(at(x), data.score(first), data.score(unseen))


def covariance(where: Sequence[Place]) -> torch.Tensor:
    """Of the logarithms of figures before anything is measured [figures, figures]."""
    found = torch.eye(len(where), dtype=torch.float64) * ALONE**2
    families = [_family(place) for place in where]
    for i, one in enumerate(families):
        for j, other in enumerate(families):
            found[i, j] += COMMON**2 * (one is not None and one == other)
    return found


def _family(place: Place) -> Place | None:
    """What a figure has a factor in common with, if it has: those of one kind, or for a GPU's own only itself."""
    return place if place[0] != "kernels" else place[:3] if place[2] in FAMILIES else None


class Data:
    """Times as rows, one a candidate."""

    def __init__(self, timed: Sequence[Timed]) -> None:
        # Predictions remember what they know of the last problem, so rows of one are next to each other.
        self.rows = [(found.problem, candidate) for found in timed for candidate in found.us]
        self.of = torch.tensor([i for i, found in enumerate(timed) for _ in found.us])  # which product
        self.count = len(timed)
        self.taken = _logs([us for found in timed for us in found.us.values()])
        # A candidate that takes twice as long as the fastest is not picked anyway: its error counts a quarter.
        self.matters = (2 * (self._least(self.taken)[self.of] - self.taken)).exp()

        self._concerned: dict[Place, list[int]] = {}

    def concerned(self, place: Place) -> list[int]:
        """The rows whose predictions a figure may change."""
        if place not in self._concerned:
            rows = enumerate(self.rows)
            self._concerned[place] = [i for i, (of, x) in rows if concerns(place, x.algorithm, of)]
        return self._concerned[place]

    def errors(self, model: DeviceModel, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logarithms of predicted over measured times [rows]."""
        which = range(len(self.rows)) if rows is None else rows
        guesses = [predicted(*self.rows[i], model) for i in which]
        return _logs(guesses) - (self.taken if rows is None else self.taken[list(rows)])

    def slopes(self, model: DeviceModel, where: Sequence[Place]) -> torch.Tensor:
        """How errors change with the logarithms of figures [rows, figures]."""
        entry, errors = model.as_dict(), self.errors(model)
        found = torch.zeros(len(errors), len(where), dtype=torch.float64)
        for j, place in enumerate(where):
            rows = self.concerned(place)
            if rows:
                moved = DeviceModel(**with_values(entry, {place: value_at(entry, place) * math.exp(DIFFERENCE)}))
                found[rows, j] = (self.errors(moved, rows) - errors[rows]) / DIFFERENCE
        return found

    def weights(self, errors: torch.Tensor) -> torch.Tensor:
        """Of each error [rows]: how much it matters, and less where it is far out among those of its product."""
        off = (errors - self._sum(errors[:, None])[self.of, 0] / self.sizes[self.of]) * self.matters / OWN
        return self.matters * ((FREEDOM + 1) / (FREEDOM + off * off)).sqrt()

    def whitened(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Errors, or their slopes, [rows, n] in units of their standard deviations: first each one's own, less the
        mean of its product, then these means [rows + products, n]."""
        precise = (weights / OWN)[:, None] ** 2
        total = self._sum(precise)
        mean = self._sum(precise * x) / total
        return torch.cat([(x - mean[self.of]) * precise.sqrt(), mean / (SHARED**2 + 1 / total).sqrt()])

    def score(self, errors: torch.Tensor) -> Score:
        white = self.whitened(errors[:, None], self.matters)
        misfit = torch.log1p(white * white / FREEDOM).mean()
        slower = (self.taken - self._least(self.taken)[self.of]).exp() - 1
        guesses = errors + self.taken
        picked = guesses <= self._least(guesses)[self.of]
        regret = torch.zeros(self.count, dtype=torch.float64)
        regret[self.of[picked]] = slower[picked]
        return Score(float(misfit), float((errors * errors).mean().sqrt()), float(regret.mean()))

    @property
    def sizes(self) -> torch.Tensor:
        return torch.bincount(self.of, minlength=self.count)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over the candidates of each product [products, n]."""
        return torch.zeros(self.count, x.shape[1], dtype=torch.float64).index_add(0, self.of, x)

    def _least(self, x: torch.Tensor) -> torch.Tensor:
        """Of the candidates of each product [products]."""
        return torch.full((self.count,), math.inf, dtype=torch.float64).scatter_reduce(0, self.of, x, "amin")


def _logs(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()
