"""The planning table of `dspark train --dry-run --cluster FILE`, and the page that holds it: `make scaling`."""

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from dspark.config import Settings
from dspark.errors import InputError
from dspark.planning import ClusterAssumptions, Scale, scale_of
from jobs.config import fault_of, load_settings, read_yaml

PAGE = Path("docs/scaling.md")
COLUMNS = (
    "target",
    "bytes per token",
    "a trainer's tokens/s",
    "a target's tokens/s",
    "targets per trainer",
    "GB/s into a trainer",
    "trainers that a node's network feeds",
    "object store, GB",
    "target's weights, GB",
)
_PAGE_TEXT = """\
# How many targets, trainers and bytes

Written by `make scaling` from `{file}`; no number here is typed. The same table for your machines:

    dspark train PRESET --dry-run --cluster FILE

{table}

Read it like this:

- *bytes per token*: the taps and the last state in bf16, the id and the mask. It is what the stream carries.
- *a trainer's tokens/s*: what one trainer GPU uses up, so what its targets have to capture.
- *targets per trainer*: target GPUs that keep one trainer GPU busy. Below 1, one target feeds several trainers.
- *GB/s into a trainer*: what crosses the network where targets and trainers are on different nodes. *Trainers that a
  node's network feeds*: with more of them on one node, the network is the slowest part; put targets on the same nodes
  (leave `ray.target_labels` and `ray.trainer_labels` unset), or capture to a cache once.
- *object store*: the rows of one optimizer step and of the next, and `targets.in_flight_mb`, over all nodes of a run.
- *target's weights*: must fit into one GPU of {memory:g} GB beside the states of a forward of `targets.batch_tokens`.

Assumed: {assumed}.

What the arithmetic leaves out is named in `dspark/planning.py`. It is no measurement: run a short training first, whose
last lines say how long the trainers waited and which side to grow (`docs/streaming.md`).
"""


def load_cluster(file: Path) -> ClusterAssumptions:
    """Raises InputError if the file cannot be read, or lists its first fault."""
    try:
        return ClusterAssumptions.model_validate_json(json.dumps(read_yaml(file, "cluster file")))
    except ValidationError as error:
        raise InputError(f"{file}: {fault_of(error.errors(include_url=False)[0])}") from None


def scales(file: Path, preset: Path | None = None, settings: Settings | None = None) -> list[Scale]:
    """A row for each preset of the file; `settings` stand in for those of `preset`, with overrides say.

    Raises:
        InputError: the file or one of its presets cannot be read, lacks the shape of `preset`, or is of another kind.
    """
    cluster = load_cluster(file)
    files = {(file.parent / path).resolve(): shape for path, shape in cluster.presets.items()}
    if preset is not None and preset.resolve() not in files:
        known = ", ".join(cluster.presets)
        raise InputError(f"{file} has no shape for {preset} under `presets` (it has {known}): add its target's sizes")
    found = []
    for path, shape in files.items():
        own = settings if settings is not None and preset is not None and path == preset.resolve() else None
        own = own or load_settings(path, [])
        if own.drafter.kind != "dspark":
            raise InputError(f"{path} trains {own.drafter.kind}: the planning table knows the work of dspark alone")
        found.append(scale_of(own.target.model, shape, own, cluster))
    return found


def cells_of(scale: Scale) -> list[str]:
    """One row in the order of `COLUMNS`."""
    return [
        scale.name,
        f"{scale.bytes_per_token:,}",
        f"{scale.trainer_tokens_per_s:,.0f}",
        f"{scale.target_tokens_per_s:,.0f}",
        f"{scale.targets_per_trainer:.2f}",
        f"{scale.network_bytes_per_s / 1e9:.2f}",
        f"{scale.trainers_per_link:.1f}",
        f"{scale.object_store_bytes / 1e9:.0f}",
        f"{scale.target_memory_bytes / 1e9:.0f}",
    ]


def print_scaling(console: Console, file: Path, preset: Path, settings: Settings) -> None:
    """The table on the screen."""
    table = Table(*COLUMNS)
    for scale in scales(file, preset, settings):
        table.add_row(*cells_of(scale))
    console.print(table)


def page_of(file: Path) -> str:
    """The page for a file of assumptions."""
    cluster = load_cluster(file)
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(cells_of(scale) for scale in scales(file))]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    roles = {"trainer": cluster.trainer, "target": cluster.target}
    parts = [f"a {name} GPU of {one.tflops:g} TFLOPS used to {one.utilisation:.0%}" for name, one in roles.items()]
    parts += [f"{cluster.network_gbit_per_s:g} Gbit/s for each node", f"rows of {cluster.mean_tokens} tokens"]
    parts += [f"{cluster.supervised_share:.0%} of them supervised"]
    assumed = ", ".join(parts)
    return _PAGE_TEXT.format(file=file, table=table, memory=cluster.target.memory_gb, assumed=assumed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="assumptions, such as platform/clusters/example.yaml")
    PAGE.write_text(page_of(parser.parse_args().file))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
