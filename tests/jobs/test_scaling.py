"""The cluster file, its faults, and the page that is made of the shipped one."""

from pathlib import Path

import pytest

from dspark.errors import InputError
from jobs.config import load_settings
from jobs.progress import which_side
from jobs.scaling import COLUMNS, PAGE, cells_of, page_of, scales

EXAMPLE = Path("platform/clusters/example.yaml")
PRESET = Path("platform/presets/qwen3_4b_dspark.yaml")


def test_the_shipped_page_is_the_one_that_the_example_gives() -> None:
    assert PAGE.read_text() == page_of(EXAMPLE)
    rows = [cells_of(scale) for scale in scales(EXAMPLE)]
    assert [row[0].split("/")[1] for row in rows] == ["Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "gemma-4-12B-it"]
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][1] == "30,725"


def test_overrides_of_the_command_stand_in_the_table() -> None:
    fewer = scales(EXAMPLE, PRESET, load_settings(PRESET, ["drafter.taps=[1, 33]"]))
    assert fewer[0].bytes_per_token == 2 * 2560 * 3 + 5
    assert fewer[1] == scales(EXAMPLE)[1]


def test_faults_of_a_cluster_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(EXAMPLE.read_text().replace("utilisation: 0.25", "utilisation: 25"))
    with pytest.raises(
        InputError, match=r"cluster\.yaml: trainer\.utilisation: found 25, needed less than or equal to 1"
    ):
        scales(file)
    with pytest.raises(InputError, match=r"has no shape for other\.yaml"):
        scales(EXAMPLE, Path("other.yaml"), None)


@pytest.mark.parametrize(
    ("trainers", "targets", "source", "said"),
    [
        (
            [0.9, 0.5, 0.3], [0.9, 0.1], "live",
            "the trainers waited 40% of their time for captured states: raise targets.actors",
        ),
        ([0.9, 0.5, 0.3], [], "cache", "raise cache.readers"),
        ([0.9, 0.01, 0.0], [0.9, 0.8, 0.4], "live", "the targets waited 60% of their time for the trainers: raise"),
        ([0.9, 0.0], [0.9, 0.1], "live", None),
        ([0.9, 0.01, 0.0], [], "cache", None),
        ([0.9, 0.1, 0.1], [0.9, 0.2], "live", None),
        ([0.9, 0.3], [0.9, 0.4], "live", "the targets waited 40%"),
        ([0.9], [], "live", "waited 90%"),
        ([], [], "live", None),
    ],
)  # fmt: skip
def test_the_slower_side_is_named_by_the_time_that_the_other_one_waits(
    trainers: list[float], targets: list[float], source: str, said: str | None
) -> None:
    settings = load_settings(PRESET, [f"data.source={source}"])
    history = [{"waiting_share": share} for share in trainers] + [{"targets_waiting_share": one} for one in targets]
    hint = which_side(history, settings)
    assert (hint is None) if said is None else said in (hint or "")
