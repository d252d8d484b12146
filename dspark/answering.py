"""Section of the settings that says how `dspark prepare` regenerates answers: from what, by whom, sampled how."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dspark.sections import Count, Fraction, LocalPath, Positive, Section, Weight


class EndpointSettings(Section):
    """OpenAI-compatible servers of the target, for `prepare.via=endpoint`."""

    addresses: tuple[Annotated[str, Field(pattern=r"^https?://[^\s?#@]+$")], ...] = Field(
        (), description="base addresses such as http://host:8000/v1; requests go to the least busy one"
    )
    api: Literal["completions", "chat"] = Field(
        "completions", description="`completions` sends the target's own token ids; `chat` lets the server render"
    )
    model: str | None = Field(None, description="name that the servers give the target; null: `target.model`")
    key_variable: str | None = Field(
        None, description="environment variable that holds the key; null: no key is sent; it is never written anywhere"
    )
    concurrency: Positive = Field(32, description="requests in flight, times the number of addresses")
    timeout_s: Annotated[float, Field(gt=0)] = Field(600, description="longest wait for one answer")
    attempts: Positive = Field(6, description="tries per answer, with growing pauses, on 429, 5xx and timeouts")


class PrepareSettings(Section):
    """Conversations whose answers the target writes anew. `target`, `data.thinking` and `seed` count too."""

    source: str | None = Field(
        None, description="conversations: a file as in data.conversations, a folder of them, or a dataset on the hub"
    )
    subset: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset")
    limit: Positive | None = Field(
        None, description="take so many conversations from the start, and read no further; null: all"
    )
    folder: LocalPath | None = Field(None, description="where the rows go; null: `output`/prepared/`name`")
    validation: Fraction = Field(0.01, description="share of conversations for validation.jsonl")
    held_out: Fraction = Field(0.01, description="share of conversations for held_out.jsonl")
    via: Literal["actors", "vllm", "endpoint"] = Field(
        "actors", description="who answers: target actors, vLLM in the actors, or OpenAI-compatible servers"
    )
    temperature: Weight | None = Field(None, description="null: the target's generation_config, else 1")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="null: the generation_config's, else 1")
    top_k: Count | None = Field(None, description="0: all tokens; null: the generation_config's, else 0")
    min_p: Fraction | None = Field(None, description="null: the generation_config's, else 0")
    max_tokens: Positive = Field(2048, description="longest answer, in tokens")
    max_context: Positive | None = Field(
        None, description="longest prompt plus answer, in tokens; null: the target's positions"
    )
    keep_cut: bool = Field(False, description="keep answers that max_tokens cut off, as rows with finish: length")
    actors: Positive = Field(
        1, description="responder actors; via=endpoint has none, and no use for keys from here to task_rows"
    )
    threads: Positive = Field(1, description="torch threads per actor, for via=actors")
    cpus: Weight = Field(1, description="logical CPUs that Ray books per actor")
    gpus: Weight = Field(0, description="GPUs that Ray books per actor")
    batch: Positive = Field(
        16, description="answers that an actor decodes together, for via=actors; vLLM chooses its own"
    )
    task_rows: Positive = Field(64, description="conversations of similar length that an actor takes at a time")
    endpoint: EndpointSettings = EndpointSettings()

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.validation + self.held_out >= 1:
            raise ValueError(
                f"validation={self.validation} and held_out={self.held_out} leave nothing for training: lower them"
            )
        if (self.via == "endpoint") != bool(self.endpoint.addresses):
            raise ValueError("via=endpoint and endpoint.addresses belong together: set both or none")
        return self
