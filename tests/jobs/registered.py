"""Runs and evaluations on disk as the commands leave them, made without Ray, for tests of the registry."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from actors.evaluator import EvaluationTask, EvaluatorActor, packed
from dspark.config import Settings
from dspark.evaluation.metrics import PromptResult
from dspark.evaluation.summary import result_json
from dspark.model.checkpoints import WEIGHTS, save_drafter
from dspark.model.drafter import Drafter
from dspark.sections import TargetSettings
from dspark.target import load_target
from dspark.target_files import fingerprint, load_tokenizer, load_whole_config, resolve
from jobs.config import load_settings
from jobs.evaluating import planned
from jobs.experiment import Experiment, open_experiment
from jobs.reporting import RESULT, write_results
from jobs.results import DESCRIPTION, ResultsFile, description_of
from jobs.rows import prepare_prompts
from tests.conftest import tiny_preset
from tests.dspark.decoding.decoders import random_drafter
from tests.tiny import tiny_target_folder


def echoing_target(folder: Path) -> Path:
    """A target whose layers add nothing, so that its likeliest next token is the last one again."""
    tiny_target_folder(folder)
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def drafters(target: Path) -> tuple[Drafter, Drafter]:
    """One that guesses, and one that has seen through this target: its Markov head repeats every token."""
    loaded = load_target(TargetSettings(model=str(target), dtype="fp32"))
    guessing, echoing = random_drafter(loaded, "vanilla"), random_drafter(loaded, "vanilla")
    head = echoing.markov_head
    assert head is not None
    directions_Vr = normalize(torch.randn(head.markov_w1.weight.shape, generator=torch.Generator().manual_seed(7)))
    head.markov_w1.weight.data.copy_(directions_Vr)
    head.markov_w2.weight.data.copy_(directions_Vr * 1000)
    return guessing, echoing


def preset_of(folder: Path, target: Path) -> Path:
    """With three questions of gsm8k and two of mt-bench."""
    bench = folder / "bench"
    bench.mkdir()
    for name, count in (("gsm8k", 3), ("mt-bench", 2)):
        rows = [{"turns": [f"what is {i} cats"]} for i in range(count)]
        (bench / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_preset(folder, target, evaluate={"benchmarks": str(bench), "max_new_tokens": 16, "prompts_t1": 1})


def trained_run(settings: Settings, drafter: Drafter) -> Experiment:
    """A finished run of `dspark train`: its folder, its MLflow run, its drafter."""
    experiment = open_experiment(settings, None)
    target = TargetSettings(model=settings.target.model, dtype="fp32")
    facts = {
        "target": {"name": "tiny", "fingerprint": fingerprint(resolve(target)), "architectures": ["LlamaForCausalLM"]},
        "data": {"conversations": "train.jsonl", "fingerprint": "d" * 16},
        "steps": 8,
    }
    with experiment.tracker:
        save_drafter(
            experiment.drafter, drafter.state_dict(), drafter.config, load_target(target).vocabulary,
            load_whole_config(target), 8, torch.float32, facts,
        )  # fmt: skip
    return experiment


def evaluation_run(settings: Settings, drafters: Mapping[str, Path]) -> Path:
    """The folder of a finished `dspark evaluate`, its link to the first drafter included."""
    prompts = prepare_prompts(settings, load_tokenizer(settings.target))
    task = EvaluationTask(
        settings.target, drafters, settings.evaluate, settings.data.max_length, None, settings.seed, "tiny"
    )
    actor, results = EvaluatorActor(task), list[PromptResult]()
    for batch in planned(settings, prompts):
        (row,) = actor(packed(batch))["results"].to_pylist()
        results += [PromptResult(**one) for one in json.loads(row)]
    experiment = open_experiment(settings, None)
    with experiment.tracker:
        experiment.drafter.symlink_to(next(iter(drafters.values())))
        ResultsFile(experiment.folder, description_of(settings, drafters, prompts)).begin(results)
        result = result_json(results, {}, None, None, [], settings.seed)
        write_results(experiment.folder, settings, load_tokenizer(settings.target), results, [], result, {})
    return experiment.folder


def measured_otherwise(evaluation: Path, folder: Path, key: str, value: object) -> Path:
    """A copy of an evaluation that was made with another setting."""
    description = json.loads((evaluation / DESCRIPTION).read_text())
    results = ResultsFile(evaluation, description).read()
    folder.mkdir()
    ResultsFile(folder, {**description, key: value}).begin(results)
    (folder / RESULT).write_text((evaluation / RESULT).read_text())
    return folder


def read(preset: Path, *overrides: str) -> Settings:
    return load_settings(preset, list(overrides))
