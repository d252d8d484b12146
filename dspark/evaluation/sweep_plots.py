"""Pictures of a sweep as PNG bytes: its trials over their settings, what mattered, and how each one learned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.inspection import permutation_importance
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold

from dspark.evaluation import figures
from dspark.evaluation.figures import Theme

# From fewer trials nothing can be said about several settings.
FEWEST_TRIALS = 4
_TREES, _REPEATS, _FOLDS = 100, 20, 5


@dataclass(frozen=True)
class Point:
    """One trial: its value of each setting, what it reached, and whether it was trained to its end."""

    number: int
    values: Mapping[str, Any]
    score: float
    finished: bool


def parallel_coordinates(points: Sequence[Point], keys: Sequence[str], metric: str, theme: Theme) -> bytes:
    """One line per trial over an axis per setting; the colour is the metric, dashes are trials that were stopped."""
    figure, axes = figures.panel(theme)
    scores = [point.score for point in points]
    scale, colours = Normalize(min(scores), max(scores)), colormaps["viridis"]
    places = {key: _places([point.values.get(key) for point in points]) for key in keys}
    for row, point in enumerate(points):
        heights = [places[key][row] for key in keys]
        axes.plot(
            range(len(keys)), heights, color=colours(scale(point.score)), linewidth=3 if point.number == 0 else 1.8,
            linestyle="-" if point.finished else (0, (4, 3)), marker="o", markersize=4,
        )  # fmt: skip
    for x, key in enumerate(keys):
        _ends(axes, x, [point.values.get(key) for point in points], places[key], theme)
    axes.set_xticks(range(len(keys)), keys, rotation=12 if len(keys) > 4 else 0)
    axes.set_xlim(-0.25, len(keys) - 0.6)
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([])
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, pad=0.02)
    bar.set_label(metric, color=theme.text, fontsize=11)
    bar.ax.tick_params(colors=theme.muted, labelsize=10)
    bar.outline.set_visible(False)
    return figures.png(figure)


def importance_bars(shares: Mapping[str, float], theme: Theme) -> bytes:
    """How much of the differences each setting explains."""
    ordered = sorted(shares.items(), key=lambda one: -one[1])
    figure, axes = figures.panel(theme, rows=len(ordered))
    axes.barh(range(len(ordered)), [share for _, share in ordered], 0.6, color=figures.colour(theme, 0))
    axes.set_yticks(range(len(ordered)), [key for key, _ in ordered])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of what the settings explain")
    return figures.png(figure)


def learning_curves(curves: Mapping[str, Sequence[tuple[int, float]]], metric: str, theme: Theme) -> bytes:
    """The metric of each trial over its steps; the first curve, that of the preset, is thick."""
    figure, axes = figures.panel(theme)
    few = len(curves) <= 2 * len(theme.series)
    for i, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        colour = figures.colour(theme, i) if few else (theme.series[0] if i == 0 else theme.muted)
        axes.plot(
            steps, values, color=colour, linewidth=2.6 if i == 0 else 1.3, label=name if few or i == 0 else None,
            linestyle="-" if i < len(theme.series) else (0, (4, 2)), marker="o", markersize=3,
        )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(metric)
    figures.legend(axes, theme)
    return figures.png(figure)


def importances(points: Sequence[Point], keys: Sequence[str]) -> dict[str, float]:
    """Each setting's share of what a forest of trees needs to tell good trials from bad ones.

    Permutation importance on trials that the forest has not seen: how much worse it does when a setting's values are
    dealt to other trials. Empty from too few trials, or if it knows no more of unseen ones than their mean. Scores
    should be those of one step that all trials have reached.
    """
    scores = np.array([point.score for point in points])
    if len(points) < FEWEST_TRIALS or np.ptp(scores) == 0:
        return {}
    features = np.array([_places([point.values.get(key) for point in points]) for key in keys]).T
    predicted, losses = np.empty_like(scores), np.zeros(len(keys))
    for seen, unseen in KFold(min(_FOLDS, len(points)), shuffle=True, random_state=0).split(features):
        forest = RandomForestRegressor(_TREES, random_state=0).fit(features[seen], scores[seen])
        predicted[unseen] = forest.predict(features[unseen])
        found = permutation_importance(
            forest, features[unseen], scores[unseen], scoring="neg_mean_squared_error", n_repeats=_REPEATS,
            random_state=0,
        )  # fmt: skip
        losses += found["importances_mean"] * len(unseen)
    if r2_score(scores, predicted) <= 0:
        return {}
    shares: NDArray[np.float64] = np.clip(losses, 0, None)
    total = float(shares.sum())
    return {key: float(share) / total for key, share in zip(keys, shares, strict=True)} if total > 0 else {}


def _places(values: Sequence[Any]) -> list[float]:
    """Each value's place between 0 and 1: by size, in logarithms over a wide range; by rank if not all are numbers."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        numbers = np.array(values, np.float64)
        if numbers.min() > 0 and numbers.max() > 20 * numbers.min():
            numbers = np.log(numbers)
    else:
        ranked = sorted(values, key=lambda value: (0, value) if isinstance(value, int | float) else (1, 0))
        order = list(dict.fromkeys(map(_text, ranked)))
        numbers = np.array([order.index(_text(value)) for value in values], np.float64)
    width = np.ptp(numbers)
    scaled: list[float] = ((numbers - numbers.min()) / width if width else np.full(len(numbers), 0.5)).tolist()
    return scaled


def _ends(axes: Axes, x: int, values: Sequence[Any], places: Sequence[float], theme: Theme) -> None:
    """The axis of a setting, with its values; of more than a few numbers only the least and the largest."""
    axes.axvline(x, color=theme.grid, linewidth=1, zorder=0)
    shown = {place: _text(value) for place, value in zip(places, values, strict=True)}
    if len(shown) > 4:
        shown = {place: shown[place] for place in (min(shown), max(shown))}
    for place, text in shown.items():
        axes.text(x + 0.03, place + 0.02, text[:16], color=theme.muted, fontsize=9, va="bottom")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=str)
