"""Pictures of a calibration and of a simulation as PNG bytes."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from dspark.decoding.calibration import Bin, SlotQuality
from dspark.decoding.simulate import Replayed
from dspark.evaluation import figures
from dspark.evaluation.figures import Theme

_COLUMNS, _PANEL_IN = 4, 2.3
_FEW_ROUNDS = 5  # a share of fewer is chance, and not drawn
_LARGEST_MARK, _SMALLEST_MARK = 70.0, 8.0  # areas, in square points


def reliability_diagrams(before: Sequence[SlotQuality], after: Sequence[SlotQuality], theme: Theme) -> bytes:
    """One panel per slot: accepted share over prediction, before and after; a mark's area is its bin's rounds."""
    columns = min(_COLUMNS, len(before))
    rows = -(-len(before) // columns)
    # A slot alone still needs the width of the legend and of its title.
    size = (max(figures.SIZE_IN[0], _PANEL_IN * columns), _PANEL_IN * rows + 0.8)
    figure = Figure(
        figsize=size, dpi=figures.DPI, facecolor=theme.background, layout=ConstrainedLayoutEngine(h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    panels: list[Axes] = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for slot, (panel, old, new) in enumerate(zip(panels, before, after, strict=False)):
        figures.style(panel, theme)
        panel.plot((0, 1), (0, 1), color=theme.muted, linewidth=1, linestyle=(0, (3, 3)))
        _marks(panel, old.bins, figures.colour(theme, 1), "temperature 1", theme)
        _marks(panel, new.bins, figures.colour(theme, 0), "calibrated", theme)
        errors = "" if old.ece is None or new.ece is None else f"  {old.ece:.3f} → {new.ece:.3f}"
        panel.set_title(f"slot {slot}{errors}", color=theme.text, fontsize=10, loc="left")
        panel.set_aspect("equal")
        panel.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for panel in panels[len(before) :]:
        panel.set_visible(False)
    figure.supxlabel("predicted: slots up to this one accepted", color=theme.text, fontsize=11)
    figure.supylabel("accepted", color=theme.text, fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, labelcolor=theme.text, fontsize=10, ncols=2, loc="outside upper left")
    return figures.png(figure)


def throughput_curves(replays: Sequence[Replayed], theme: Theme) -> bytes:
    """Tokens per second of all requests over their number, one line per policy."""
    curves = _by_policy(replays, {one: one.tokens_per_second for one in replays})
    return _curves_over_requests(curves, "tokens per second", theme)


def verified_curves(replays: Sequence[Replayed], theme: Theme) -> bytes:
    """Draft tokens verified per round and request over the number of requests, one line per policy."""
    drafting = [one for one in replays if one.policy != "plain"]
    curves = _by_policy(drafting, {one: one.verified for one in drafting})
    return _curves_over_requests(curves, "draft tokens verified per round", theme)


def _by_policy(replays: Sequence[Replayed], values: Mapping[Replayed, float]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for one in replays:
        curves.setdefault(one.policy, []).append((one.requests, values[one]))
    return curves


def _curves_over_requests(curves: Mapping[str, Sequence[tuple[int, float]]], label: str, theme: Theme) -> bytes:
    figure, axes = figures.panel(theme)
    drafting = [name for name in curves if name != "plain"]  # so that a policy has one colour in all pictures
    for i, (name, points) in enumerate(curves.items()):
        requests, values = zip(*points, strict=True)
        colour = figures.colour(theme, drafting.index(name)) if name in drafting else theme.muted
        axes.plot(requests, values, label=name, color=colour, marker=figures.marker(i), markersize=5, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests decoded together")
    axes.set_ylabel(label)
    figures.legend(axes, theme)
    return figures.png(figure)


def _marks(panel: Axes, bins: Sequence[Bin], colour: str, label: str, theme: Theme) -> None:
    shown = [one for one in bins if one.rounds >= _FEW_ROUNDS]
    most = max((one.rounds for one in shown), default=1)
    areas = [max(_SMALLEST_MARK, _LARGEST_MARK * one.rounds / most) for one in shown]
    predicted, accepted = [one.predicted for one in shown], [one.accepted for one in shown]
    panel.plot(predicted, accepted, color=colour, linewidth=1, alpha=0.6)
    panel.scatter(predicted, accepted, s=areas, color=colour, label=label, edgecolors=theme.background, linewidths=0.5)
