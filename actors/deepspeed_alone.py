"""DeepSpeed without MLflow, which its autotuner would import: a quarter of a trainer's start, for nothing.

Every module takes DeepSpeed from here, so that whichever comes first leaves MLflow out.
"""

import sys

_hidden = sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # as Python marks what cannot be imported
try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
finally:
    if _hidden is None:
        del sys.modules["mlflow"]

__all__ = ["DeepSpeedEngine", "deepspeed"]
