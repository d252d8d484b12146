"""The MLmodel file of a registered drafter: what goes in, what comes out, and how its folder is read."""

import numpy as np
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import ColSpec, Schema, TensorSpec

from dspark.model.config import DSparkConfig
from dspark.model.kinds import AnyConfig

MLMODEL = "MLmodel"
_IDS, _STATES = np.dtype(np.int64), np.dtype(np.float32)


def signature_of(config: AnyConfig) -> ModelSignature:
    """One proposal for R requests whose contexts hold S tokens; -1 stands for sizes that vary."""
    inputs: list[ColSpec | TensorSpec] = [
        TensorSpec(_IDS, (-1,), "anchor_ids"),
        TensorSpec(_IDS, (-1,), "anchor_positions"),
        TensorSpec(_STATES, (-1, -1, len(config.taps), config.hidden), "context_taps"),
    ]
    outputs: list[ColSpec | TensorSpec] = [TensorSpec(_IDS, (-1, config.block), "draft_ids")]
    if isinstance(config, DSparkConfig) and config.confidence:
        outputs.append(TensorSpec(_STATES, (-1, config.block), "confidence_logits"))
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def mlmodel(config: AnyConfig, layout: str) -> str:
    """The file as text; no code is loaded from it, `dspark` reads the safetensors beside it."""
    flavors = {"dspark": {"layout": layout, "drafter": str(config), "taps": list(config.taps)}}
    text: str = Model(signature=signature_of(config), flavors=flavors).to_yaml()
    return text
