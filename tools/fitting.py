"""The least squares that tools/fit_kernels.py fits with: bounded, and held out."""

import csv
import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

Rows = list[dict[str, str]]


class Bound(NamedTuple):
    """A constant to be fitted: where to begin, and what it cannot leave."""

    start: float
    low: float
    high: float


class Fit(NamedTuple):
    """Fitted constants, and the errors with them."""

    constants: dict[str, float]
    errors: dict[str, Any]


class Points(NamedTuple):
    """Measurements: what a model is asked, what was measured, how much it counts."""

    asked: Any  # array or tuple of arrays, first dim points
    seconds: np.ndarray
    weight: np.ndarray

    def take(self, which: np.ndarray) -> "Points":
        """Some of them."""
        return Points(self.asked[which], self.seconds[which], self.weight[which])


Model = Callable[[Mapping[str, float], Any], np.ndarray]


def fit(
    what: str,
    model: Model,
    bounds: Mapping[str, Bound],
    points: Points,
    share: float,
    origin: str,
    counted: np.ndarray | None = None,
) -> Fit:
    """Fit a model on a share of the points, and measure its error on the others.

    Args:
        what: For the record.
        model: Seconds from constants and what is asked.
        bounds: Of each constant.
        points: Measured.
        share: Of the points to fit on, drawn with a fixed seed.
        origin: Of the points, for the record.
        counted: Of the points, those whose errors are stated; all if None.
    """
    counted = np.ones(len(points.seconds), bool) if counted is None else counted
    order = np.random.default_rng(0).permutation(len(points.seconds))
    cut = int(len(order) * share)
    some, others = order[:cut], order[cut:]
    part = points.take(some)
    names = list(bounds)

    def residuals(values: np.ndarray) -> np.ndarray:
        seconds = model(dict(zip(names, values, strict=True)), part.asked)
        return part.weight * np.log(seconds / part.seconds)

    best = None
    for begin in starts(bounds):
        found = least_squares(
            residuals,
            begin,
            bounds=(
                [b.low for b in bounds.values()],
                [b.high for b in bounds.values()],
            ),
            loss="soft_l1",
            f_scale=0.05,
            x_scale=[max(b.start, (b.high - b.low) / 20) for b in bounds.values()],
        )
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    constants = {
        name: b.low if x - b.low < 1e-4 * (b.high - b.low) else rounded(x)
        for (name, b), x in zip(bounds.items(), best.x, strict=True)
    }
    error = 100 * np.abs(model(constants, points.asked) / points.seconds - 1)
    inner, outer = error[some][counted[some]], error[others][counted[others]]
    return Fit(
        constants,
        {
            "fit": what,
            "points": int(counted.sum()),
            "mape_fitted": round(float(inner.mean()), 1),
            "mape_held_out": round(float(outer.mean()), 1),
            "p90_held_out": round(float(np.percentile(outer, 90)), 1),
            "worst": round(float(error[counted].max()), 1),
            "origin": origin,
        },
    )


def starts(bounds: Mapping[str, Bound], tries: int = 3) -> Iterable[np.ndarray]:
    """Where to begin: the stated values, and others drawn around them."""
    rng = np.random.default_rng(0)
    low, high = (np.array([b[i] for b in bounds.values()]) for i in (1, 2))
    begin = np.array([b.start for b in bounds.values()])
    inside = 1e-6 * (high - low)
    for i in range(tries):
        moved = begin * np.exp(0.3 * rng.standard_normal(len(begin))) if i else begin
        yield np.clip(moved, low + inside, high - inside)


def rounded(value: float, digits: int = 3) -> float:
    """To so many digits that count."""
    return float(f"{value:.{digits}g}")


def read(path: Path) -> Rows:
    """Rows of a compressed table."""
    with gzip.open(path, "rt", newline="") as lines:
        return list(csv.DictReader(lines))


def columns(rows: Rows, names: Sequence[str]) -> np.ndarray:
    """Numbers of some columns; an empty field is 0.  [rows, names]."""
    return np.array([[float(row[name] or 0) for name in names] for row in rows])


def fit_error(
    model: Model, constants: Mapping[str, float], points: Points, which: np.ndarray
) -> float:
    """Mean relative error in per cent over some of the points."""
    some = points.take(which)
    error = np.abs(model(constants, some.asked) / some.seconds - 1)
    return round(float(100 * error.mean()), 1)
