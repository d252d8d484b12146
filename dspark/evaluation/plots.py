"""The report's pictures as PNG bytes, each in a light and a dark theme."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dspark.evaluation import figures
from dspark.evaluation.figures import Theme
from dspark.evaluation.metrics import PARTS

History = Sequence[Mapping[str, Any]]

DASHES = ("-", (0, (5, 2)))
PART_NAMES = {"prefill": "prompt pass", "draft": "draft", "verify": "verify", "other": "other"}


def loss_curves(history: History, theme: Theme) -> bytes:
    """Loss and its terms over the optimizer steps; the thin line is each logged step, the thick one its mean."""
    names = {"loss": "total", "loss_ce": "cross-entropy", "loss_l1": "L1 distance", "loss_confidence": "confidence"}
    return _curves(history, names, "loss", theme)


def tau_curves(history: History, theme: Theme) -> bytes:
    """Expected tokens per round over the optimizer steps."""
    names = {"tau_probabilistic": "sampled (T = 1)", "tau_greedy": "greedy (T = 0)"}
    return _curves(history, names, "τ: expected tokens per round", theme)


def slot_curves(rates: Mapping[str, Sequence[float | None]], label: str, theme: Theme) -> bytes:
    """Share of accepted tokens over the slots of a block, one line per domain or drafter."""
    figure, axes = figures.panel(theme)
    for i, (domain, shares) in enumerate(rates.items()):
        slots = [k for k, share in enumerate(shares) if share is not None]
        values = [share for share in shares if share is not None]
        axes.plot(
            slots, values, label=domain[:20], color=figures.colour(theme, i), marker=figures.marker(i), markersize=6,
            linewidth=2, linestyle=DASHES[i // len(theme.series) % len(DASHES)], clip_on=False,
        )  # fmt: skip
    axes.set_xlim(-0.3, max(map(len, rates.values()), default=1) - 0.7)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("slot k of the block")
    axes.set_ylabel(label)
    figures.legend(axes, theme)
    return figures.png(figure)


def threshold_curves(sweep: Sequence[Mapping[str, float]], theme: Theme) -> bytes:
    """Tokens kept and verified per round over the confidence threshold."""
    figure, axes = figures.panel(theme)
    thresholds = [row["threshold"] for row in sweep]
    for i, (key, label) in enumerate((("verified", "verified"), ("kept", "kept"))):
        axes.plot(
            thresholds, [row[key] for row in sweep], label=label, color=figures.colour(theme, i),
            marker=figures.marker(i), markersize=5, linewidth=2,
        )  # fmt: skip
    axes.set_ylim(0, 1.05 * max(row["verified"] for row in sweep))
    axes.set_xlabel("confidence threshold")
    axes.set_ylabel("tokens per round")
    figures.legend(axes, theme)
    return figures.png(figure)


def reliability_curves(bins: Mapping[str, Sequence[Mapping[str, float]]], label: str, theme: Theme) -> bytes:
    """Accepted share over the mean prediction of each bin, one line per slot; larger marks stand for more rounds."""
    figure, axes = figures.panel(theme)
    axes.plot((0, 1), (0, 1), color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    most = max((one["rounds"] for rows in bins.values() for one in rows), default=1)
    for i, (name, rows) in enumerate(bins.items()):
        predicted, accepted = ([one[key] for one in rows] for key in ("predicted", "accepted"))
        axes.plot(predicted, accepted, color=figures.colour(theme, i), linewidth=1.2, label=name)
        sizes = [10 + 90 * one["rounds"] / most for one in rows]
        axes.scatter(predicted, accepted, sizes, color=figures.colour(theme, i), marker=figures.marker(i))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(f"predicted {label}")
    axes.set_ylabel("accepted")
    figures.legend(axes, theme)
    return figures.png(figure)


def speed_bars(rows: Mapping[str, Mapping[str, Any]], theme: Theme) -> bytes:
    """Tokens per second of plain and speculative decoding, with the speed-up; `rows` are summaries by their label."""
    figure, axes = figures.panel(theme, rows=2 * len(rows))
    speeds = [row["tokens_per_second"] for row in rows.values()]
    highest = max((speed[name] or 0.0 for speed in speeds for name in ("plain", "speculative")), default=0.0)
    for y, row in enumerate(rows.values()):
        speed = row["tokens_per_second"]
        axes.barh(y - 0.19, speed["plain"] or 0.0, 0.36, color=theme.muted, label="plain" if y == 0 else None)
        axes.barh(
            y + 0.19, speed["speculative"] or 0.0, 0.36, color=theme.series[0], label="speculative" if y == 0 else None
        )
        note = "" if row["speedup"] is None else f"{row['speedup']:.2f}×"
        end = max(speed["plain"] or 0.0, speed["speculative"] or 0.0) + highest * 0.015
        axes.text(end, y, note, color=theme.text, va="center", fontsize=11, fontweight="bold")
    _rows(axes, list(rows), highest * 1.13)
    axes.set_xlabel("tokens per second")
    figures.legend(axes, theme)
    return figures.png(figure)


def time_bars(rows: Mapping[str, Mapping[str, Any]], theme: Theme) -> bytes:
    """Milliseconds per token: plain decoding against the parts of speculative decoding, stacked."""
    figure, axes = figures.panel(theme, rows=2 * len(rows))
    labels: list[str] = []
    longest = 0.0
    for name, row in rows.items():
        plain = 1000 * row["seconds"]["plain"] / max(row["plain_tokens"], 1)
        axes.barh(len(labels), plain, 0.66, color=theme.muted, label="plain" if not labels else None)
        _inside(axes, plain / 2, len(labels), plain, longest_of=plain, theme=theme)
        labels.append(f"{name}\nplain")
        left = 0.0
        for i, part in enumerate(PARTS):
            width = 1000 * row["seconds"][part] / max(row["tokens"], 1)
            axes.barh(
                len(labels), width, 0.66, left=left, color=theme.series[(1, 2, 0, 3)[i]], edgecolor=theme.background,
                linewidth=1, label=PART_NAMES[part] if len(labels) == 1 else None,
            )  # fmt: skip
            _inside(axes, left + width / 2, len(labels), width, longest_of=plain, theme=theme)
            left += width
        labels.append("speculative")
        longest = max(longest, plain, left)
    _rows(axes, labels, longest * 1.04)
    axes.set_xlabel("milliseconds per generated token")
    figures.legend(axes, theme)
    return figures.png(figure)


def _curves(history: History, names: Mapping[str, str], label: str, theme: Theme) -> bytes:
    figure, axes = figures.panel(theme)
    seen: list[float] = []
    for i, (key, name) in enumerate(names.items()):
        steps, values = _series(history, key)
        if not len(steps):
            continue
        seen += [values.min(), values.max()]
        colour = figures.colour(theme, i)
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(steps, _smoothed(values), color=colour, linewidth=2.2 if i == 0 else 1.7, label=name)
    # Ticks of a logarithmic axis need some range; below it, and with zeros, a linear one reads better.
    logarithmic = bool(seen) and min(seen) > 0 and max(seen) > 6 * min(seen)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_few_minor_labels))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{label} (log scale)" if logarithmic else label)
    axes.margins(x=0.01)
    figures.legend(axes, theme)
    return figures.png(figure)


def _series(history: History, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values that were measured and are finite."""
    found = {
        record["step"]: float(record[key])
        for record in history
        if record.get(key) is not None and math.isfinite(record[key])
    }
    steps = sorted(found)
    return np.array(steps), np.array([found[step] for step in steps])


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about a twentieth of the points; at the ends over those there are."""
    half = max(1, len(values) // 40)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    smooth: np.ndarray = (sums[high] - sums[low]) / (high - low)
    return smooth


def _few_minor_labels(value: float, _: int | None) -> str:
    leading = round(value / 10 ** math.floor(math.log10(value)))
    return f"{value:g}" if leading in (2, 5) else ""


def _rows(axes: Axes, labels: Sequence[str], width: float) -> None:
    """Horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    spare = max(0, 3 - len(labels)) / 2  # so that one or two bars do not fill the panel
    axes.set_ylim(len(labels) - 0.5 + spare, -0.5 - spare)
    axes.set_xlim(0, width or 1)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=axes.spines["bottom"].get_edgecolor(), linewidth=0.9)


def _inside(axes: Axes, x: float, y: float, value: float, longest_of: float, theme: Theme) -> None:
    """The number in a bar that is wide enough for it."""
    if value > 0.09 * longest_of:
        axes.text(x, y, f"{value:.0f}" if value >= 10 else f"{value:.1f}", color=theme.background, fontsize=11,
                  ha="center", va="center", fontweight="bold")  # fmt: skip
