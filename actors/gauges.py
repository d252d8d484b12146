"""Numbers of running jobs for Prometheus, on the metrics endpoint that Ray keeps on every node; MLflow has the records.

trainer rank 0, target and evaluator actors -> Ray's agent on their node -> `ray_dspark_loss{run="..."}`, ...

A gauge is there as long as its process: Ray forgets it some seconds later. Counters stay until the node's agent ends.
"""

import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from ray.util.metrics import Counter, Gauge


class Measure(NamedTuple):
    """What a number means, whether it only grows, and its labels beside `run`."""

    meaning: str
    grows: bool = False
    labels: tuple[str, ...] = ()


MEASURES = {
    "dspark_step": Measure("optimizer steps done"),
    "dspark_recorded_seconds": Measure("when the newest record, or before it the start, was made, since 1970"),
    "dspark_loss": Measure("the loss"),
    "dspark_tau_probabilistic": Measure("tokens per round that the training batches predict"),
    "dspark_accept_rate": Measure("share of this slot's drafts that training expects to be accepted", labels=("slot",)),
    "dspark_waiting_share": Measure("share of the trainers' time spent waiting for captured rows"),
    "dspark_tokens_per_second": Measure("trained tokens per second of all ranks"),
    "dspark_rows_not_finite": Measure("share of the rows since the last record whose states are not finite"),
    "dspark_grad_norm": Measure("norm of the gradients"),
    "dspark_trained_rows": Measure("rows of optimizer steps, those that fill up an epoch included", True),
    "dspark_captured_rows": Measure("rows that targets captured", True),
    "dspark_captured_tokens": Measure("tokens that targets captured", True),
    "dspark_captured_bytes": Measure("bytes of hidden states that targets captured", True),
    "dspark_capture_seconds": Measure("seconds that targets spent capturing", True),
    "dspark_acceptance_length": Measure("tokens kept per round in an evaluator's newest batch", labels=("drafter",)),
    "dspark_decoded_tokens": Measure("tokens that evaluators decoded", True, labels=("drafter",)),
    "dspark_decode_seconds": Measure("seconds that evaluators spent decoding", True, labels=("drafter",)),
}
# Of a training record, by the name that it has there.
_OF_RECORDS = (
    "step", "loss", "tau_probabilistic", "waiting_share", "tokens_per_second", "rows_not_finite", "grad_norm",
)  # fmt: skip
_SLOT = "accept_rate_"
PLAIN = "none"  # the label `drafter` of plain decoding


def exported(name: str) -> str:
    """The name at the endpoint."""
    return f"ray_{name}_total" if MEASURES[name].grows else f"ray_{name}"


class Gauges:
    """The numbers of one run, by the names of `MEASURES`."""

    def __init__(self, run: str) -> None:
        self.run = run

    def set(self, name: str, value: float, **labels: str) -> None:
        """Shows the newest value of a number."""
        _gauge(name).set(value, {"run": self.run, **labels})

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Adds to a number that only grows."""
        if amount > 0:
            _counter(name).inc(amount, {"run": self.run, **labels})

    def record(self, record: Mapping[str, float], rows: int) -> None:
        """Shows a training record over so many rows."""
        for name in _OF_RECORDS:
            if name in record:
                self.set(f"dspark_{name}", record[name])
        for name, value in record.items():
            if name.startswith(_SLOT):
                self.set("dspark_accept_rate", value, slot=name.removeprefix(_SLOT))
        self.set("dspark_recorded_seconds", time.time())
        self.add("dspark_trained_rows", rows)


# One of each in a process: Ray takes a second one of a name for the same.
@cache
def _gauge(name: str) -> Gauge:
    measure = MEASURES[name]
    return Gauge(name, measure.meaning, ("run", *measure.labels))


@cache
def _counter(name: str) -> Counter:
    measure = MEASURES[name]
    return Counter(name, measure.meaning, ("run", *measure.labels))
