"""Sections of the settings that say what is learnt and how: drafter, losses, optimizer step."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dspark.sections import AutoPrecision, Count, Fraction, LocalPath, Positive, Section, Weight

LOGITS_MB = 160


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
    start_from: LocalPath | None = Field(
        None,
        description="folder of a drafter, of any layout that `dspark export` reads, or a registered one "
        "(models:/NAME@champion), whose tensors are taken over",
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
    prefetch: Count = Field(
        2,
        description="micro-batches made ready by threads while one is trained, each of micro_batch x tokens x "
        "(taps + 1) x hidden values in `precision`, on the host and on the GPU; 0: each when it is needed",
    )
    anchors: Positive = Field(512, description="blocks drawn per row, A")
    recompute: bool = Field(
        False, description="compute each draft layer once more in the backward: less memory, about a quarter more time"
    )
    logits_mb: Positive = Field(LOGITS_MB, description="memory of the objective's chunks of logits, in MB")
    epochs: Positive = Field(10, description="passes over the rows; rows without weight fill the last step")
    max_steps: Positive | None = Field(None, description="stop after so many optimizer steps, whatever `epochs` says")
    lr: Annotated[float, Field(gt=0)] = 6e-4
    warmup: Fraction = Field(0.04, description="share of the steps over which the rate rises from 0; then cosine to 0")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    weight_decay: Weight = 0.0
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="largest gradient norm")
    log_every: Positive = 10
    checkpoint_every: Positive = Field(3000, description="optimizer steps between checkpoints; the last step has one")
    keep_last: Positive | None = Field(None, description="newest checkpoints kept; null: 2, or 1 beside `keep_best`")
    keep_best: Positive | None = Field(
        None, description="checkpoints with the best `validation.metric` kept beside the newest ones; null: none"
    )
    storage: str | None = Field(
        None, description="folder or URI (s3://, gs://, file://) of the checkpoints; null: in the run's folder"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="decay of the weights' moving average, which is validated and exported; null: none"
    )
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
    def kept_by_age(self) -> int:
        """How many of the newest checkpoints stay."""
        return self.keep_last or (2 if self.keep_best is None else 1)

    @property
    def kept(self) -> int:
        """Most checkpoints that stay, by age or by their metric."""
        return self.kept_by_age + (self.keep_best or 0)

    @property
    def share(self) -> int:
        """Rows per rank and optimizer step."""
        return self.global_batch // self.workers

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank and optimizer step."""
        return self.global_batch // (self.workers * self.micro_batch)
