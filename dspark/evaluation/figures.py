"""What the pictures have in common: two themes, a styled panel, a legend that hides nothing, and PNG bytes.

Only Figure objects, no pyplot: nothing global is left behind, and no display is needed.
"""

import io
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

SIZE_IN = (6.4, 3.7)
DPI = 160


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


def panel(theme: Theme, rows: int = 0) -> tuple[Figure, Axes]:
    """One styled panel; `rows` of bars make it higher than the usual size where they need it."""
    height = max(SIZE_IN[1], 1.2 + 0.36 * rows)
    figure = Figure(figsize=(SIZE_IN[0], height), dpi=DPI, facecolor=theme.background,
                    layout=ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14))  # fmt: skip
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style(axes, theme)
    return figure, axes


def style(axes: Axes, theme: Theme) -> None:
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


def legend(axes: Axes, theme: Theme) -> None:
    """Above the panel, where it hides no data; in rows of three if one row would be too wide."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, frameon=False, labelcolor=theme.text, fontsize=11, handlelength=1.4, columnspacing=1.3,
            handletextpad=0.5, borderaxespad=0.4, loc="lower left", bbox_to_anchor=(0, 1.0),
            ncols=len(handles) if sum(len(label) + 5 for label in labels) <= 60 else 3,
        )  # fmt: skip


def colour(theme: Theme, i: int) -> str:
    """Of the i-th series; they come again after the last one."""
    return theme.series[i % len(theme.series)]


def marker(i: int) -> str:
    """The form of the i-th series."""
    return "osD^vPX*"[i % 8]


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return stream.getvalue()
