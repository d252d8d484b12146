"""`dspark check-reference`: the drafter, its losses and gradients against stored reference cases."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.errors import InputError
from dspark.sections import Precision
from dspark.training.reference import BOUNDS, CASE, Difference, compare_case


def check_reference(folders: Sequence[Path], dtype: Precision = "fp32") -> bool:
    """Compares every case, prints the largest differences and says whether all are within the tolerance.

    A folder is a case, or holds cases at any depth. InputError is raised for a folder that is neither. Computed in
    `dtype`, with the bounds of `dspark.training.reference.Bounds`.
    """
    console = Console(highlight=False)
    passed = []
    for case in [case for folder in folders for case in _cases(folder)]:
        differences = compare_case(case, dtype)
        console.print(_table(case, differences))
        passed.append(all(difference.within for difference in differences))
    failed, bounds = len(passed) - sum(passed), BOUNDS[dtype]
    measure = ", for gradients of their norm" if bounds.whole_gradients else ""
    console.print(
        f"{len(passed)} cases, {failed} beyond the tolerance ({dtype}, tensor by tensor: target logits "
        f"{bounds.target_logits:.3g}, draft logits {bounds.draft_logits:.3g}, confidence {bounds.confidence:.3g}, "
        f"losses {bounds.losses:.3g}, gradients {bounds.layer_gradients:.3g}, behind the layers "
        f"{bounds.head_gradients:.3g} of the largest stored magnitude{measure})",
        soft_wrap=True,
    )
    return failed == 0


def _cases(folder: Path) -> list[Path]:
    found = sorted(file.parent for file in folder.rglob(CASE))
    if not found:
        raise InputError(f"{folder} holds no reference case: needed {CASE} and config.json in it or below it")
    return found


def _table(case: Path, differences: Sequence[Difference]) -> Table:
    """One line per group of tensors: its largest absolute and relative difference, and the tensors that fail."""
    table = Table("tensors", "count", "absolute", "relative", "result", title=Text(str(case)), title_justify="left")
    for group, grouped in groupby(differences, key=lambda difference: difference.group):
        members = list(grouped)
        failed = [difference.name for difference in members if not difference.within]
        table.add_row(
            group,
            str(len(members)),
            f"{np.max([difference.absolute for difference in members]):.2e}",
            f"{np.max([difference.relative for difference in members]):.2e}",
            f"FAILED: {', '.join(failed)}" if failed else "ok",
            style="red" if failed else "",
        )
    return table


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("check-reference")
