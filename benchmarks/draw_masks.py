"""Draws the attention masks of docs/algorithms.md from the rules that training is tested against: `make pictures`."""

import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from dspark.training.blocks import make_blocks, visibility
from dspark.training.eagle3 import visible_rows

DOCS = Path(__file__).parents[1] / "docs"
TOKENS = ["<user>", "name", "two", "birds", "<answer>", "A", "robin", "and", "a", "wren", "."]
ANSWER = TOKENS.index("A")
COLOURS = ListedColormap(["#f1f1ee", "#3f6fb5", "#e0913a"])


def cells(axes: Axes, values: np.ndarray, rows: list[str], columns: list[str], title: str) -> None:
    """A grid of cells: 0 hidden, 1 context, 2 own block or chain."""
    axes.pcolormesh(values, cmap=COLOURS, vmin=0, vmax=2, edgecolors="white", linewidth=1.5)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=10, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_blocks() -> None:
    """Two DSpark blocks of four slots on one text."""
    ids = torch.arange(len(TOKENS))[None]
    loss_mask = torch.arange(len(TOKENS))[None] >= ANSWER
    anchors = [ANSWER, ANSWER + 3]
    blocks = make_blocks(ids, loss_mask, [np.array(anchors)], 4, 4.0)
    visible = visibility(blocks, len(TOKENS))[0, 0].numpy().astype(int)
    visible[:, len(TOKENS) :] *= 2
    slots = [f"{TOKENS[anchor] if slot == 0 else 'mask'} at {anchor + slot}" for anchor in anchors for slot in range(4)]
    rows = [
        f"{place} predicts {TOKENS[int(position) + 1] if valid else 'nothing'}"
        for place, position, valid in zip(
            slots, blocks.positions_BAK.flatten(), blocks.valid_BAK.flatten(), strict=True
        )
    ]
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    cells(axes, visible, rows, TOKENS + slots, "what each slot of two blocks sees: context (blue), own block (orange)")
    figure.savefig(DOCS / "mask-blocks.png", dpi=130)
    pyplot.close(figure)


def draw_chains() -> None:
    """Three chained EAGLE-3 steps of two rows of a text."""
    rows = [ANSWER - 1, ANSWER + 1]
    steps = 3
    seen = visible_rows(torch.tensor([rows]), torch.zeros(1, len(rows)), len(TOKENS), steps)
    visible = seen[0, 0].numpy().astype(int)
    visible[:, len(TOKENS) :] *= 2
    columns = TOKENS + [f"step {step}, row {row}" for step in range(1, steps) for row in rows]
    # Step j sees the columns of the steps up to itself.
    width = [len(TOKENS) + step * len(rows) for step in range(steps)]
    grid = np.concatenate([np.where(np.arange(len(columns)) < width[step], visible, 0) for step in range(steps)])
    names = [f"step {step}, row {row} predicts {TOKENS[row + step + 2]}" for step in range(steps) for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    cells(axes, grid, names, columns, "what chained rows see: the target's rows (blue), the drafter's own (orange)")
    figure.savefig(DOCS / "mask-chains.png", dpi=130)
    pyplot.close(figure)


def main() -> int:
    matplotlib.use("agg")
    draw_blocks()
    draw_chains()
    return 0


if __name__ == "__main__":
    sys.exit(main())
