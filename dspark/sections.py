"""Sections of the settings that say where a run works: target, data, evaluation, tracking, Ray."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _on_a_disk(value: object) -> object:
    # As a path, `s3://bucket/x` would be the folder `s3:` of the working directory.
    if isinstance(value, str) and "://" in value:
        raise ValueError(f"{value!r} is an address, needed is a path on a disk that this machine mounts")
    return value


LocalPath = Annotated[Path, BeforeValidator(_on_a_disk)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["fp32", "bf16"]
# `auto` becomes one of the two before work starts: bf16 where the device multiplies it natively, else fp32.
AutoPrecision = Literal["auto", "fp32", "bf16"]
# Those that transformers takes. Its tensor parallelism is no choice: it wants a process per GPU, all in step, where a
# target actor is one process that is placed, killed and replaced alone.
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Count | Literal["cpu", "disk"]]


# How the name of a registered drafter begins: models:/NAME@ALIAS or models:/NAME/NUMBER.
REGISTERED = "models:/"
# Of runs and registered models; they become parts of paths.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"

# Benchmark -> the domain over whose benchmarks tables average.
BENCHMARKS = {
    "gsm8k": "math",
    "math500": "math",
    "aime25": "math",
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "mt-bench": "chat",
    "alpaca": "chat",
    "arena-hard-v2": "chat",
}


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError(f"{list(values)} names one twice: leave out the second")
    return values


def _benchmark(name: str) -> str:
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}: choose among {', '.join(BENCHMARKS)}")
    return name


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class TargetSettings(Section):
    """The model that the drafter proposes for."""

    model: str = Field(description="local folder, hub id, or `smollm2-135m-instruct` (the quickstart's data wheel)")
    revision: str | None = Field(None, description="hub revision; unused for local folders")
    dtype: AutoPrecision = Field("auto", description="compute type of the captured forward; auto: bf16 if native")
    device_map: DeviceMap | None = Field(
        None,
        description="for a target larger than one device: how its layers are dealt to the GPUs of a process, to memory "
        "and to disk; `auto`, or {module: GPU number, cpu or disk}; null: one device holds all",
    )


class TargetPoolSettings(Section):
    """The Ray Data actor pool that hosts the target while hidden states are captured."""

    actors: Positive = Field(1, description="target actors at the start")
    max_actors: Positive | None = Field(None, description="the pool may grow to this; null: it stays at `actors`")
    threads: Positive = Field(1, description="torch threads per actor")
    cpus: Weight = Field(1, description="logical CPUs that Ray books per actor")
    gpus: Weight = Field(0, description="GPUs that Ray books per actor")
    batch_tokens: Positive = Field(4096, description="most tokens, padding included, in one target forward")
    window_rows: Positive = Field(32, description="rows of the plan that are sorted by length and captured together")
    in_flight_mb: Positive = Field(512, description="bytes of captured states between targets and trainers, in MB")


class DataSettings(Section):
    """Conversations, and how they become token rows."""

    conversations: LocalPath = Field(description="training rows: .jsonl, .json or .parquet, each also as .gz")
    held_out: LocalPath = Field(description="prompts that training never sees, for `evaluate`")
    source: Literal["live", "cache", "live_and_keep"] = Field(
        "live",
        description="states for training: from target actors, from the cache, or in the first epoch from actors that "
        "also write the cache, which is read later",
    )
    validation: Path | None = Field(None, description="rows that `validation.every` measures, as `prepare` writes them")
    max_length: Positive = Field(4096, description="tokens per training row; longer rows are cut at the end")
    thinking: bool | None = Field(None, description="`enable_thinking` of the chat template; null: not passed")
    max_bad_fraction: Fraction = Field(0.05, description="share of dropped rows above which the job stops")
    roles: dict[str, str] = Field(
        default_factory=dict, description="aliases of role names, such as {human: user, gpt: assistant}"
    )


Batches = Annotated[tuple[Positive, ...], BeforeValidator(_listed), AfterValidator(_distinct), Field(min_length=1)]
Benchmarks = Annotated[tuple[Annotated[str, AfterValidator(_benchmark)], ...], AfterValidator(_distinct)]


class ValidationSettings(Section):
    """The objective on rows that training never sees, measured while it runs."""

    every: Positive | None = Field(
        None, description="optimizer steps between measurements on data.validation, and at the last; null: never"
    )
    metric: Literal["tau_probabilistic", "tau_greedy", "loss"] = Field(
        "tau_probabilistic", description="what decides which checkpoint is better: the largest tau or the smallest loss"
    )
    patience: Positive | None = Field(
        None, description="stop after so many measurements without a better one; null: train to the end"
    )

    @model_validator(mode="after")
    def _patience_measures(self) -> Self:
        if self.patience is not None and self.every is None:
            raise ValueError(f"patience={self.patience} counts measurements: set validation.every too")
        return self

    @property
    def smaller(self) -> bool:
        """Whether a smaller value of the metric is better."""
        return self.metric == "loss"


class EvaluateSettings(Section):
    """Speculative decoding of held-out prompts against plain decoding of the same target."""

    actors: Positive = Field(2, description="evaluator actors at the start")
    max_actors: Positive | None = Field(None, description="the pool may grow to this; null: it stays at `actors`")
    threads: Positive = Field(1, description="torch threads per actor")
    cpus: Weight = Field(1, description="logical CPUs that Ray books per actor")
    gpus: Weight = Field(0, description="GPUs that Ray books per actor")
    dtype: Precision = Field("fp32", description="compute type of target and drafter; fp32 must be token-identical")
    batch: Batches = Field(
        (1,),
        description="requests decoded together; of several sizes, such as [1, 8], the first gives the main numbers",
    )
    max_new_tokens: Positive = 32
    prompts_t0: Positive = Field(48, description="prompts decoded at temperature 0")
    prompts_t1: Count = Field(12, description="of these, also decoded at `temperature`")
    temperature: Annotated[float, Field(gt=0)] = 1.0
    every: Positive | None = Field(
        None,
        description="training steps after which one more actor measures the drafter, meanwhile, at temperature 0 with "
        "the first size of `batch`; null: never",
    )
    top_k: Count = Field(0, description="likeliest tokens drawn from above temperature 0; 0: all")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="mass of the likeliest tokens drawn from")
    policy: Literal["fixed", "threshold", "scheduled"] = Field(
        "fixed", description="how many drafts of a request are verified: `slots`, by confidence, or by step rates"
    )
    slots: Positive | None = Field(None, description="policy fixed: drafts per round; null: the drafter's block")
    threshold: Fraction | None = Field(None, description="policy threshold: least confidence of a verified draft")
    calibration: LocalPath | None = Field(
        None, description="JSON file of `dspark calibrate`: temperatures of the confidences, step rates for scheduled"
    )
    benchmarks: LocalPath | None = Field(
        None, description="folder of NAME.jsonl with `turns`; measured besides held_out"
    )
    benchmark_names: Benchmarks = Field(
        (), description="benchmarks to measure, from that folder or else from the hub; empty: all files of the folder"
    )
    benchmark_prompts: Positive | None = Field(16, description="prompts taken from each benchmark; null: all")
    turns: Literal["first", "all"] = Field(
        "first", description="of benchmarks the first turn, or each later one too, behind the target's own answers"
    )
    thinking: bool | None = Field(None, description="`enable_thinking` of the prompts; null: as data.thinking")

    @model_validator(mode="after")
    def _pool_grows(self) -> Self:
        if self.max_actors is not None and self.max_actors < self.actors:
            raise ValueError(f"max_actors={self.max_actors} is below actors={self.actors}: raise it, or leave it out")
        return self

    @property
    def widest_pool(self) -> int:
        """Most evaluators at one time."""
        return self.max_actors or self.actors


class TrackingSettings(Section):
    """MLflow: where runs go, and the name under which drafters are registered."""

    uri: str | None = Field(
        None, description="tracking URI; null: MLFLOW_TRACKING_URI, or without it an SQLite file in `output`"
    )
    experiment: str = "dspark"
    model_name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        None, description="registered model; null: the preset's `name`"
    )
    register_model: bool = Field(True, description="whether `dspark run` registers its drafter")


class RaySettings(Section):
    """The Ray that the jobs run on."""

    address: str = Field("local", description="`local` starts one for this job; `auto` or host:port joins a cluster")
    dashboard_port: Positive | None = Field(
        None,
        description="serve the dashboard of a local Ray on this loopback port; a cluster that is joined has its own",
    )
    object_store_mb: Positive = Field(1024, description="object store of a local Ray, in MB")
    target_labels: dict[str, str] = Field(
        default_factory=dict,
        description="labels of the nodes that hold targets, also those that evaluate and answer; none: any",
    )
    trainer_labels: dict[str, str] = Field(
        default_factory=dict, description="labels of the nodes that hold trainers; none: any node"
    )
