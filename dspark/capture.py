"""Hidden states of token rows: the function that target actors run.

Rows come in plan order and leave in plan order; in between they are grouped by length, so that little is padded. The
groups depend on the rows alone: the same window gives the same bits on any actor.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dspark.data.captures import bf16_column, encode, is_finite
from dspark.data.origin import Origin, final_column, origin_of, tap_column
from dspark.data.plan import capture_batches
from dspark.data.render import Sample
from dspark.errors import InputError
from dspark.target import Target

# Logits of one forward agree with those of another only up to rounding of the compute dtype.
_LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def capture(target: Target, samples: Sequence[Sample], origin: Origin, batch_tokens: int) -> pa.Table:
    """The captured table of `samples`, at most `batch_tokens` tokens (padding included) in one forward."""
    states: dict[int, list[Tensor]] = {tap: [_NONE] * len(samples) for tap in origin.taps}
    final: list[Tensor] = [_NONE] * len(samples)
    for rows in capture_batches([len(sample.input_ids) for sample in samples], batch_tokens):
        output = target.states(padded_ids([samples[row] for row in rows], target.device), origin.taps)
        for place, row in enumerate(rows):
            length = len(samples[row].input_ids)
            final[row] = output.final[place, :length]
            for tap, state in zip(origin.taps, output.taps[place, :length].split(target.hidden, dim=-1), strict=True):
                states[tap][row] = state
    return encode(origin, samples, states, final)


_NONE = torch.empty(0)


def bad_columns(table: pa.Table, row: int) -> list[str]:
    """The columns of a captured row whose states are not finite."""
    columns = [*map(tap_column, origin_of(table.schema).taps), final_column()]
    return [name for name in columns if not is_finite(table, name, row)]


class OnlyFinite:
    """Takes samples out of captured tables whose states are not finite; `limit` of them in a row are an error.

    One that overflows is the sample's matter; a run of them is the target's, or that of its compute type.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row = limit, 0

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of `table` that are finite.

        Raises:
            InputError: `limit` rows in a row, over all tables so far, are not.
        """
        keep = []
        for row in range(table.num_rows):
            bad = bad_columns(table, row)
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if self.in_a_row == self.limit:
                raise InputError(
                    f"{self.limit} samples in a row gave states that are not finite, the last one is "
                    f"{table.column('sample_id')[row].as_py()} (in {', '.join(bad)}): check the target's weights, try "
                    "target.dtype=fp32, or raise cache.max_bad_run"
                )
            keep.append(not bad)
        return table if all(keep) else table.filter(pa.array(keep))


def padded_ids(samples: Sequence[Sample], device: torch.device) -> Tensor:
    """Token ids [B, S] of rows of unequal length, zeros at the end; causal attention never lets padding be read."""
    length = max(len(sample.input_ids) for sample in samples)
    ids = np.zeros((len(samples), length), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
    return torch.from_numpy(ids).to(device)


def _apart(found_1SX: Tensor, own_1SX: Tensor) -> float:
    """Largest relative distance at any position."""
    found, own = found_1SX.float(), own_1SX.float()
    return float(((found - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-30)).max())


@torch.inference_mode()
def prove_capture(target: Target, sample: Sample, taps: Sequence[int]) -> None:
    """Shows on one sample that captured states are what the contract says.

    `vocabulary.logits(final)` must be the model's own logits, and each tap the model's own hidden state of that layer,
    at every position by itself: one huge activation, as first tokens often have, would hide all others.
    A failure is a defect of this project or a model that does not fit its family, so it is an assertion.
    """
    ids = padded_ids([sample], target.device)
    states = target.states(ids, taps)
    whole = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    gap = _apart(target.vocabulary.logits(states.final), whole.logits)
    tolerance = _LOGIT_TOLERANCE[target.dtype]
    assert gap <= tolerance, f"final is not the normed last state of {target.name}: logits differ by {gap:.1e}"
    for tap, state in zip(taps, states.taps.split(target.hidden, dim=-1), strict=True):
        apart = _apart(state, whole.hidden_states[tap + 1])
        assert apart <= tolerance, f"tap {tap} is not the output of decoder block {tap}: they differ by {apart:.1e}"


# bf16 states of one target on two machines differ by about 1 % at the median position, those of two layers by far more.
_ELSEWHERE_TOLERANCE = 0.05


def states_apart(target: Target, table: pa.Table, row: int) -> dict[str, float]:
    """How far stored states of a row are from what the target gives: by column, the median relative distance.

    Raises:
        InputError: a column is too far away: the states are another target's, or another layer's.
    """
    origin, ids = origin_of(table.schema), table.column("input_ids")[row].values.to_numpy()
    own = target.states(torch.from_numpy(ids.astype(np.int64))[None].to(target.device), origin.taps)
    apart = {}
    expected = [*own.taps[0].split(target.hidden, dim=-1), own.final[0]]
    for name, own_SH in zip([*map(tap_column, origin.taps), final_column()], expected, strict=True):
        stored_SH = bf16_column(table, name, row, origin.hidden).float().to(own_SH.device)
        distance_S = (stored_SH - own_SH.float()).norm(dim=-1) / own_SH.float().norm(dim=-1).clamp(min=1e-30)
        apart[name] = float(distance_S.median())
    if wrong := {name: round(value, 3) for name, value in apart.items() if not value <= _ELSEWHERE_TOLERANCE}:
        raise InputError(
            f"stored states are not those of {target.name}: relative distances {wrong}, at most {_ELSEWHERE_TOLERANCE} "
            "was expected: name the target that they come from"
        )
    return apart
