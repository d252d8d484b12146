"""Settings: frozen, typed, closed to unknown keys; each default is declared here and nowhere else.

A preset (`platform/presets/*.yaml`) sets any of them, dotted overrides (`loss.l1=0.9`) come last. Rules that need only
the settings are checked here; rules that need the target (taps, mask token) in `dspark.model.config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dspark.kind_keys import named_unused, without_unused

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["fp32", "bf16"]
# `auto` becomes one of the two before work starts: bf16 where the device multiplies it natively, else fp32.
AutoPrecision = Literal["auto", "fp32", "bf16"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class TargetSettings(Section):
    """The model that the drafter proposes for."""

    model: str = Field(description="local folder, hub id, or `smollm2-135m-instruct` (the quickstart's data wheel)")
    revision: str | None = Field(None, description="hub revision; unused for local folders")
    dtype: AutoPrecision = Field("auto", description="compute type of the captured forward; auto: bf16 if native")


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

    conversations: Path = Field(description="training rows: .jsonl, .json or .parquet, each also as .gz")
    held_out: Path = Field(description="prompts that training never sees, for `evaluate`")
    max_length: Positive = Field(4096, description="tokens per training row; longer rows are cut at the end")
    thinking: bool | None = Field(None, description="`enable_thinking` of the chat template; null: not passed")
    max_bad_fraction: Fraction = Field(0.05, description="share of dropped rows above which the job stops")
    roles: dict[str, str] = Field(
        default_factory=dict, description="aliases of role names, such as {human: user, gpt: assistant}"
    )


class DrafterSettings(Section):
    """Architecture of the drafter (design sections 4 and 5). `dspark.kind_keys` says which keys a kind lacks."""

    kind: Literal["dspark", "eagle3"] = Field(
        "dspark", description="a block in one pass over mask tokens, or token by token from one layer"
    )
    layers: Positive = Field(5, description="draft layers D")
    block: Positive = Field(7, description="tokens proposed in a round, K")
    taps: tuple[Annotated[int, Field(ge=-1)], ...] = Field(
        description="target layers whose outputs feed the drafter; -1 is the embedding output"
    )
    mask_token_id: Count | None = Field(
        None, description="token in the slots behind the anchor; never derived, always given for kind dspark"
    )
    markov_rank: Count = Field(256, description="rank r of the Markov head; 0: none (DFlash)")
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    family: Literal["qwen3", "llama", "gemma4"] | None = Field(
        None,
        description="form of the draft layers; null: the target's own, and for Llama-shaped targets `qwen3`, which "
        "engines load; `llama` has no norms of queries and keys, and no engine loads it",
    )
    init: Literal["random", "target"] = Field(
        "random",
        description="at random, or layers as copies of the target's last ones and the Markov head from its bigrams",
    )
    start_from: Path | None = Field(
        None, description="folder of a drafter, of any layout that `dspark export` reads, whose tensors are taken over"
    )
    vocab: Positive | None = Field(
        None, description="propose from the training rows' most frequent tokens alone, so many; null: from all"
    )
    confidence: bool = Field(True, description="whether a confidence head is trained")
    confidence_with_markov: bool = Field(True, description="the confidence head also reads the Markov embedding")

    @field_validator("mask_token_id")
    @classmethod
    def _mask_token_given(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None and info.data.get("kind") == "dspark":
            raise PydanticCustomError("missing", "kind dspark needs a mask token")
        return value

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if not self.taps or len(set(self.taps)) != len(self.taps) or list(self.taps) != sorted(self.taps):
            raise ValueError(f"taps {list(self.taps)} must be distinct, ascending and at least one")
        if self.kind == "dspark" and self.confidence and self.confidence_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_with_markov=true needs markov_rank > 0: raise the rank or set confidence_with_markov=false"
            )
        if self.start_from is not None and self.init != "random":
            raise ValueError(f"start_from is set, so init={self.init} would be overwritten: leave one of them out")
        return self


class LossSettings(Section):
    """Weights of the three loss terms and their decay over the slots (paper section 3.3)."""

    ce: Weight = 0.1
    l1: Weight = 0.9
    confidence: Weight = 1.0
    gamma: Annotated[float, Field(gt=0)] | None = Field(4.0, description="slot k weighs exp(-k/gamma); null: no decay")
    denominator: Literal["global", "micro_batch"] = Field(
        "global", description="weights are summed over the whole optimizer step, or per micro-batch as published"
    )

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.ce + self.l1 == 0:
            raise ValueError("loss.ce and loss.l1 are both 0: nothing would train the drafter's tokens")
        return self


class Eagle3Settings(Section):
    """Training of an EAGLE-3 drafter: chained steps on its own outputs (design section 5)."""

    ttt_length: Positive = Field(7, description="chained steps of training")
    step_loss_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="step j weighs this to the power j")
    mask_alignment: Literal["aligned", "published"] = Field(
        "aligned", description="the loss covers what decoding asks for, or the mask stays unshifted as published"
    )
    normaliser: Literal["sequences", "published"] = Field(
        "sequences", description="every sequence weighs the same, or the sum is divided by all tokens as published"
    )


class TrainSettings(Section):
    """The optimizer step and the trainers that make it."""

    workers: Positive = Field(1, description="trainer ranks")
    threads: Positive = Field(1, description="torch threads per rank")
    cpus: Weight = Field(1, description="logical CPUs that Ray books per rank")
    gpus: Weight = Field(0, description="GPUs that Ray books per rank")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage")
    precision: AutoPrecision = Field(
        "auto", description="type of weights in the forward, auto: bf16 if native; master weights stay fp32"
    )
    global_batch: Positive = Field(512, description="rows per optimizer step, over all ranks and micro-batches")
    micro_batch: Positive = Field(1, description="rows per rank and forward")
    pack_tokens: Positive | None = Field(
        None, description="pack a micro-batch's rows into tensors of at most so many tokens a row; null: pad each row"
    )
    anchors: Positive = Field(512, description="blocks drawn per row, A")
    epochs: Positive = Field(10, description="passes over the rows; rows without weight fill the last step")
    max_steps: Positive | None = Field(None, description="stop after so many optimizer steps, whatever `epochs` says")
    lr: Annotated[float, Field(gt=0)] = 6e-4
    warmup: Fraction = Field(0.04, description="share of the steps over which the rate rises from 0; then cosine to 0")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    weight_decay: Weight = 0.0
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="largest gradient norm")
    log_every: Positive = 10
    checkpoint_every: Positive = 3000
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept")
    max_failures: Count = Field(2, description="restarts of the trainer group after a fault")

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        rows = self.workers * self.micro_batch
        if self.global_batch % rows:
            raise ValueError(
                f"global_batch={self.global_batch} is no multiple of workers x micro_batch = {self.workers} x "
                f"{self.micro_batch} = {rows}: change one of them"
            )
        if self.pack_tokens is not None and self.micro_batch == 1:
            raise ValueError(
                f"pack_tokens={self.pack_tokens} packs the rows of a micro-batch, and micro_batch=1 has nothing to "
                "pack: raise micro_batch or set pack_tokens=null"
            )
        return self

    @property
    def share(self) -> int:
        """Rows per rank and optimizer step."""
        return self.global_batch // self.workers

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank and optimizer step."""
        return self.global_batch // (self.workers * self.micro_batch)


class EvaluateSettings(Section):
    """Speculative decoding of held-out prompts against plain decoding of the same target."""

    actors: Positive = 2
    threads: Positive = Field(1, description="torch threads per actor")
    cpus: Weight = Field(1, description="logical CPUs that Ray books per actor")
    gpus: Weight = Field(0, description="GPUs that Ray books per actor")
    dtype: Precision = Field("fp32", description="compute type of target and drafter; fp32 must be token-identical")
    batch: Positive = Field(1, description="requests decoded together")
    max_new_tokens: Positive = 32
    prompts_t0: Positive = Field(48, description="prompts decoded at temperature 0")
    prompts_t1: Count = Field(12, description="of these, also decoded at `temperature`")
    temperature: Annotated[float, Field(gt=0)] = 1.0
    benchmarks: Path | None = Field(None, description="folder of NAME.jsonl with `turns`; measured besides held_out")
    benchmark_prompts: Positive = Field(16, description="prompts taken from each benchmark file")


class TrackingSettings(Section):
    """MLflow: where runs go, and the name under which drafters are registered."""

    uri: str | None = Field(None, description="tracking URI; null: an SQLite file in `output`")
    experiment: str = "dspark"
    model_name: str | None = Field(None, description="registered model; null: the preset's `name`")
    register_model: bool = True


class RaySettings(Section):
    """The Ray that the jobs run on."""

    address: str = Field("local", description="`local` starts one for this job; `auto` or host:port joins a cluster")
    dashboard_port: Positive | None = Field(None, description="serve Ray's dashboard on this loopback port")
    object_store_mb: Positive = Field(1024, description="object store of a local Ray, in MB")


class Settings(Section):
    """One experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    seed: Count = 42
    output: Path = Field(Path("runs"), description="folder that holds one folder per run")
    target: TargetSettings
    targets: TargetPoolSettings = TargetPoolSettings()
    data: DataSettings
    drafter: DrafterSettings
    loss: LossSettings = LossSettings()
    eagle3: Eagle3Settings = Eagle3Settings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    tracking: TrackingSettings = TrackingSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _kind_has_all(self) -> Self:
        kind = self.drafter.kind
        if named := named_unused(self, kind):
            raise ValueError(f"drafter.kind={kind} has no {', '.join(named)}: leave them out or choose another kind")
        return self

    @model_serializer(mode="wrap")
    def _used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(dump(self), self.drafter.kind)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.loss.confidence > 0 and not self.drafter.confidence:
            raise ValueError("loss.confidence > 0 needs drafter.confidence=true: set one of them")
        if self.drafter.confidence and self.loss.confidence == 0:
            raise ValueError("drafter.confidence=true needs loss.confidence > 0: an untrained head would be exported")
        if self.train.pack_tokens is not None and self.train.pack_tokens < self.data.max_length:
            raise ValueError(
                f"train.pack_tokens={self.train.pack_tokens} is below data.max_length={self.data.max_length}: a row of "
                "that length would not fit, change one of them"
            )
        if self.targets.max_actors is not None and self.targets.max_actors < self.targets.actors:
            raise ValueError(
                f"targets.max_actors={self.targets.max_actors} is below targets.actors={self.targets.actors}"
            )
        return self


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted keys: {"loss": {"l1": 0.9}} becomes {"loss.l1": 0.9}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
