"""Section of the settings that says which rounds the confidence head is calibrated on, and how."""

from pydantic import Field

from dspark.sections import Positive, Section, Weight


class CalibrateSettings(Section):
    """Temperatures of the confidence head. Prompts, answer length and actors are those of `evaluate`."""

    batch: Positive = Field(8, description="requests decoded together")
    temperature: Weight = Field(0.0, description="sampling temperature of the rounds: take the one that is served")
    bins: Positive = Field(15, description="bins of the expected calibration error, equally wide")
    min_rounds: Positive = Field(100, description="rounds that a slot needs to be given a temperature of its own")
    requests: Positive = Field(32, description="most requests in a target pass that `--profile` times")
    repeats: Positive = Field(15, description="target passes that `--profile` times for each number of tokens")
