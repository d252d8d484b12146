"""The presets that are shipped: each one loads, holds the published settings, and differs only where it must."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from actors.pipelines import check_store
from dspark.config import Settings, dotted
from dspark.errors import InputError
from dspark.model.config import draft_config
from dspark.planning import bytes_per_token
from jobs.config import load_settings
from jobs.sweeping import plan_trials

PRESETS = Path("platform/presets")
PUBLISHED = {
    "qwen3_4b": ("Qwen/Qwen3-4B", (1, 9, 17, 25, 33), 151669),
    "qwen3_8b": ("Qwen/Qwen3-8B", (1, 9, 17, 25, 33), 151669),
    "qwen3_14b": ("Qwen/Qwen3-14B", (1, 10, 19, 28, 37), 151669),
    "gemma4_12b": ("google/gemma-4-12B-it", (5, 17, 29, 41, 46), 4),
}
WIDTHS = {
    "Qwen/Qwen3-4B": 2560, "Qwen/Qwen3-8B": 4096, "Qwen/Qwen3-14B": 5120, "google/gemma-4-12B-it": 3840,
    "smollm2-135m-instruct": 576,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {
        "drafter.markov_rank": 256, "drafter.confidence": True, "loss.ce": 0.1, "loss.l1": 0.9, "loss.confidence": 1.0,
    },
    "dflash": {
        "drafter.markov_rank": 0, "drafter.confidence": False, "loss.ce": 1.0, "loss.l1": 0.0, "loss.confidence": 0.0,
    },
}  # fmt: skip
EVERYWHERE = {
    "seed": 42, "target.dtype": "bf16", "targets.gpus": 1, "data.max_length": 4096, "drafter.layers": 5,
    "drafter.block": 7, "drafter.family": None, "drafter.init": "random", "drafter.vocab": None, "loss.gamma": 4.0,
    "train.gpus": 1, "train.precision": "bf16", "train.global_batch": 512, "train.micro_batch": 1,
    "train.anchors": 512, "train.epochs": 10, "train.max_steps": None, "train.lr": 6e-4, "train.warmup": 0.04,
    "train.weight_decay": 0.0, "train.clip": 1.0, "train.log_every": 10, "train.checkpoint_every": 3000,
}  # fmt: skip


def settings_of(name: str) -> Settings:
    return load_settings(PRESETS / f"{name}.yaml", [])


def test_every_preset_loads_and_is_known_here() -> None:
    names = {file.stem for file in PRESETS.glob("*.yaml")}
    assert names >= {f"{target}_{kind}" for target in PUBLISHED for kind in (*KINDS, "eagle3")}
    for name in names:
        assert settings_of(name).name.replace("-", "_").startswith(name.replace("-", "_"))


@pytest.mark.parametrize(
    ("name", "keys", "trials"),
    [
        ("loss", ["loss.ce", "loss.l1", "loss.confidence", "loss.gamma"], 8),
        ("depth", ["drafter.layers"], 5),
        ("block", ["drafter.block"], 5),
    ],
)
def test_a_sweep_preset_varies_what_it_is_named_for_around_its_own_values(
    name: str, keys: list[str], trials: int
) -> None:
    assert {file.stem for file in (PRESETS / "sweeps").glob("*.yaml")} == {"loss", "depth", "block"}
    settings = settings_of(f"sweeps/{name}")
    planned = plan_trials(settings)
    assert (settings.name, len(planned), planned[0].values) == (f"sweep-{name}", trials, {})
    assert all(list(trial.values) == keys for trial in planned[1:])
    shared = {key for key in dotted(settings.model_dump()) if key not in (*keys, "train.max_steps")}
    own = dotted(planned[0].settings.model_dump())
    assert all(
        dotted(trial.settings.model_dump())[key] == own[key]
        for trial in planned
        for key in shared
        if not key.startswith("tune.")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", PUBLISHED)
def test_a_preset_holds_the_published_settings(target: str, kind: str) -> None:
    model, taps, mask = PUBLISHED[target]
    wanted = EVERYWHERE | KINDS[kind] | {"target.model": model, "drafter.taps": taps, "drafter.mask_token_id": mask}
    found = dotted(settings_of(f"{target}_{kind}").model_dump())
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("target", PUBLISHED)
def test_kinds_of_drafters_differ_in_their_heads_and_losses_alone(target: str) -> None:
    one, other = (dotted(settings_of(f"{target}_{kind}").model_dump()) for kind in KINDS)
    assert {key for key in one if one[key] != other[key]} == {"name", *KINDS["dspark"]}


@pytest.mark.parametrize("kind", KINDS)
def test_targets_differ_in_model_taps_mask_token_and_store_alone(kind: str) -> None:
    first, *others = (dotted(settings_of(f"{target}_{kind}").model_dump()) for target in PUBLISHED)
    allowed = {"name", "target.model", "drafter.taps", "drafter.mask_token_id", "ray.object_store_mb"}
    assert all({key for key in first if first[key] != other[key]} <= allowed for other in others)


@pytest.mark.parametrize("target", PUBLISHED)
def test_eagle3_differs_from_dspark_in_its_drafter_and_seed_alone(target: str) -> None:
    eagle3, dspark = (dotted(settings_of(f"{target}_{kind}").model_dump()) for kind in ("eagle3", "dspark"))
    assert {key for key in eagle3 if key not in dspark or eagle3[key] != dspark[key]} == {
        "name", "seed", "drafter.kind", "eagle3.ttt_length", "eagle3.step_loss_decay", "eagle3.mask_alignment",
        "eagle3.normaliser",
    }  # fmt: skip
    assert (eagle3["seed"], eagle3["eagle3.ttt_length"], eagle3["eagle3.step_loss_decay"]) == (0, 7, 0.8)


@pytest.mark.parametrize(("target", "layers"), [("qwen3_4b", 36), ("qwen3_8b", 36), ("qwen3_14b", 40)])
def test_the_taps_and_the_mask_token_fit_the_target(target: str, layers: int) -> None:
    config = Qwen3Config(num_hidden_layers=layers, vocab_size=151936, eos_token_id=151645, pad_token_id=151643)
    assert draft_config(config, settings_of(f"{target}_dspark").drafter).target_layers == layers


@pytest.mark.parametrize("file", sorted(PRESETS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_a_preset_has_a_store_for_what_its_trainers_hold_and_for_what_is_in_flight(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(file, [])
    store = settings.ray.object_store_mb * 2**20
    monkeypatch.setattr("ray.cluster_resources", lambda: {"object_store_memory": float(store)})
    a_token = bytes_per_token(WIDTHS[settings.target.model], len(settings.drafter.taps))
    # Of this step and of the next one, for each trial. 1,000 tokens are the mean; the longest step has more.
    rows = 2 * settings.train.global_batch * settings.tune.concurrent
    for tokens in (1000, 1500):
        check_store(settings, rows * tokens * a_token)
    with pytest.raises(InputError, match="the object stores have"):
        check_store(settings, store)
