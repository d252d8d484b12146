"""The report's pictures as PNG bytes, each in a light and a dark theme.

Only Figure objects, no pyplot: nothing global is left behind, and no display is needed.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dspark.evaluation.metrics import PARTS

History = Sequence[Mapping[str, Any]]

SIZE_IN = (6.4, 3.7)
DPI = 160
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 2)))
PART_NAMES = {"prefill": "prompt pass", "draft": "draft", "verify": "verify", "other": "other"}


@dataclass(frozen=True)
class Theme:
    """Colours of one background. The series differ in lightness too, so that colour-blind readers tell them apart."""

    background: str
    text: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1c2430", "#5b6675", "#e3e7ec", ("#0b62ad", "#d9620b", "#12876a", "#a3508a", "#7a6a0a", "#3f4854")
)
DARK = Theme(
    "#171c24", "#e8ecf1", "#9aa6b5", "#2c3440", ("#5fb0f5", "#f59a4a", "#45cfa5", "#d98fc4", "#d8c75a", "#aeb8c4")
)


def loss_curves(history: History, theme: Theme) -> bytes:
    """Loss and its terms over the optimizer steps; the thin line is each logged step, the thick one its mean."""
    names = {"loss": "total", "loss_ce": "cross-entropy", "loss_l1": "L1 distance", "loss_confidence": "confidence"}
    return _curves(history, names, "loss", theme)


def tau_curves(history: History, theme: Theme) -> bytes:
    """Expected tokens per round over the optimizer steps."""
    names = {"tau_probabilistic": "sampled (T = 1)", "tau_greedy": "greedy (T = 0)"}
    return _curves(history, names, "τ: expected tokens per round", theme)


def slot_curves(rates: Mapping[str, Sequence[float | None]], label: str, theme: Theme) -> bytes:
    """Share of accepted tokens over the slots of a block, one line per domain."""
    figure, axes = _figure(theme)
    for i, (domain, shares) in enumerate(rates.items()):
        slots = [k for k, share in enumerate(shares) if share is not None]
        values = [share for share in shares if share is not None]
        axes.plot(
            slots, values, label=domain[:20], color=_colour(theme, i), marker=MARKERS[i % len(MARKERS)], markersize=6,
            linewidth=2, linestyle=DASHES[i // len(theme.series) % len(DASHES)], clip_on=False,
        )  # fmt: skip
    axes.set_xlim(-0.3, max(map(len, rates.values()), default=1) - 0.7)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("slot k of the block")
    axes.set_ylabel(label)
    _legend(axes, theme)
    return _png(figure)


def speed_bars(rows: Mapping[str, Mapping[str, Any]], theme: Theme) -> bytes:
    """Tokens per second of plain and speculative decoding, with the speed-up; `rows` are summaries by their label."""
    figure, axes = _figure(theme, rows=2 * len(rows))
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
    _legend(axes, theme)
    return _png(figure)


def time_bars(rows: Mapping[str, Mapping[str, Any]], theme: Theme) -> bytes:
    """Milliseconds per token: plain decoding against the parts of speculative decoding, stacked."""
    figure, axes = _figure(theme, rows=2 * len(rows))
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
    _legend(axes, theme)
    return _png(figure)


def _curves(history: History, names: Mapping[str, str], label: str, theme: Theme) -> bytes:
    figure, axes = _figure(theme)
    seen: list[float] = []
    for i, (key, name) in enumerate(names.items()):
        steps, values = _series(history, key)
        if not len(steps):
            continue
        seen += [values.min(), values.max()]
        colour = _colour(theme, i)
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
    _legend(axes, theme)
    return _png(figure)


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


def _figure(theme: Theme, rows: int = 0) -> tuple[Figure, Axes]:
    """One styled panel; `rows` of bars make it higher than the usual size where they need it."""
    height = max(SIZE_IN[1], 1.2 + 0.36 * rows)
    figure = Figure(figsize=(SIZE_IN[0], height), dpi=DPI, facecolor=theme.background,
                    layout=ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14))  # fmt: skip
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _style(axes, theme)
    return figure, axes


def _style(axes: Axes, theme: Theme) -> None:
    """A panel without a frame, in the theme's colours."""
    axes.set_facecolor(theme.background)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.grid(axis="y", color=theme.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.muted, labelsize=11, length=0, pad=6)
    axes.xaxis.label.set(color=theme.text, fontsize=12)
    axes.yaxis.label.set(color=theme.text, fontsize=12)


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


def _legend(axes: Axes, theme: Theme) -> None:
    """Above the panel, where it hides no data; in rows of three if one row would be too wide."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, frameon=False, labelcolor=theme.text, fontsize=11, handlelength=1.4, columnspacing=1.3,
            handletextpad=0.5, borderaxespad=0.4, loc="lower left", bbox_to_anchor=(0, 1.0),
            ncols=len(handles) if sum(len(label) + 5 for label in labels) <= 60 else 3,
        )  # fmt: skip


def _colour(theme: Theme, i: int) -> str:
    return theme.series[i % len(theme.series)]


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return stream.getvalue()
