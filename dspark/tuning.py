"""Section of the settings that says what `dspark tune` varies, which trials it makes, and how it chooses among them."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dspark.sections import Count, Positive, Section

_FORMS = ("uniform", "loguniform", "choice", "grid")


def _by_dotted_key(value: Any) -> Any:
    # An override such as tune.space.loss.ce={...} arrives as nested keys, a preset may write either.
    return _flat(value, "") if isinstance(value, Mapping) else value


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        nested = isinstance(inner, Mapping) and inner and all(isinstance(one, Mapping) for one in inner.values())
        flat |= _flat(inner, f"{prefix}{key}.") if nested else {f"{prefix}{key}": inner}
    return flat


def _as_tuple(value: Any) -> Any:
    # Behind `_by_dotted_key` pydantic takes the values for Python's, where strictly a list is no tuple.
    return tuple(value) if isinstance(value, list) else value


Bounds = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
Values = Annotated[tuple[Any, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Space(Section):
    """The values of one setting: bounds to draw between, values to draw from, or values that are all tried."""

    uniform: Bounds | None = None
    loguniform: Bounds | None = None
    choice: Values | None = None
    grid: Values | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        given = [str(form) for form in value] if isinstance(value, Mapping) else []
        if len(given) != 1 or given[0] not in _FORMS:
            raise ValueError(f"found {' and '.join(given) or value}, needed exactly one of {', '.join(_FORMS)}")
        return value

    @model_validator(mode="after")
    def _values_make_sense(self) -> Self:
        given = [form for form in _FORMS if getattr(self, form) is not None]
        if (bounds := self.bounds) is not None and not bounds[0] < bounds[1]:
            raise ValueError(f"{given[0]}: {list(bounds)} must be ascending")
        if self.loguniform is not None and self.loguniform[0] <= 0:
            raise ValueError(f"loguniform: {self.loguniform[0]:g} has no logarithm, it must be above 0")
        texts = [json.dumps(value, default=str) for value in self.values]
        if len(set(texts)) != len(texts):
            raise ValueError(f"{given[0]}: [{', '.join(texts)}] names one twice: leave out the second")
        return self

    @model_serializer(mode="wrap")
    def _given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {form: value for form, value in dump(self).items() if value is not None}

    @property
    def bounds(self) -> Bounds | None:
        """Between which values are drawn; None where they are listed."""
        return self.uniform or self.loguniform

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that are listed."""
        return self.choice or self.grid or ()


class TuneSettings(Section):
    """A sweep over any settings of `drafter`, `loss`, `eagle3` and `train`; trial 0 has the preset's own values."""

    space: Annotated[dict[str, Space], BeforeValidator(_by_dotted_key)] = Field(
        default_factory=dict,
        description="what varies, such as {loss.ce: {uniform: [0.1, 1]}}; `loguniform` takes bounds too, `choice` and "
        "`grid` a list, of which `grid` has every combination tried",
    )
    trials: Positive | None = Field(
        None, description="trials in all, trial 0 included; null: every combination, where there are grids alone"
    )
    max_steps: Positive | None = Field(
        None, description="steps of a trial and of its schedule; null: as `train` says, which best.yaml keeps anyway"
    )
    metric: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = Field(
        "val_tau_probabilistic",
        description="number of a training record that decides; with `val_` measured every validation.every steps",
    )
    mode: Literal["max", "min"] | None = Field(
        None, description="whether larger or smaller is better; null: larger, and smaller if the metric is a loss"
    )
    search: Literal["random", "optuna"] = Field(
        "random", description="values drawn by the seed alone, or by Optuna from earlier trials, if it is installed"
    )
    scheduler: Literal["asha", "none"] = Field(
        "asha", description="whether trials that are worse than others at the same step are stopped early"
    )
    grace: Positive | None = Field(
        None, description="steps before asha may stop a trial; null: up to the first measurement"
    )
    reduction: Annotated[float, Field(gt=1)] = Field(3.0, description="of so many trials at a rung of asha one goes on")
    concurrent: Positive = Field(1, description="trials at the same time")
    confirm: Count = Field(3, description="best trials that are repeated with other seeds, and with them trial 0")
    seeds: Positive = Field(2, description="seeds of each of them, the first being `seed`; best.yaml has the best mean")

    @model_validator(mode="after")
    def _count_is_known(self) -> Self:
        grids = [len(space.values) for space in self.space.values() if space.grid is not None]
        combinations = math.prod(grids)
        drawn = len(self.space) - len(grids)
        if grids and self.search == "optuna":
            raise ValueError("search=optuna chooses the values itself: make each grid a choice, or set search=random")
        if not drawn and self.trials is not None and self.space:
            raise ValueError(f"trials={self.trials}: with grids alone every combination is tried, so leave it out")
        if drawn and self.trials is None:
            raise ValueError("trials: missing, values that are drawn have no end by themselves")
        if grids and drawn and self.trials is not None and self.trials <= combinations:
            raise ValueError(
                f"trials={self.trials} does not reach all {combinations} combinations of the grids beside trial 0: "
                f"set trials to at least {combinations + 1}"
            )
        return self

    @property
    def smaller(self) -> bool:
        """Whether a smaller value of the metric is better."""
        return self.mode == "min" if self.mode is not None else "loss" in self.metric
