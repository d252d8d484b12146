"""The data contract: bit-exact round trips, and origins that are compared field by field."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.capture import OnlyFinite
from dspark.data.captures import bf16_column, encode
from dspark.data.origin import (
    FORMAT_VERSION,
    Origin,
    fault_table,
    final_column,
    origin_of,
    refuse_fault,
    schema_of,
    tap_column,
)
from dspark.data.render import Sample
from dspark.errors import InputError

ORIGIN = Origin("name", "main", "weights", "render", (-1, 2, 5), 4, "bf16")


def sample(number: int, length: int) -> Sample:
    ids = np.arange(length, dtype=np.int32) + 1000 * number
    return Sample(f"id-{number}", f"c-{number}", None, ids, (ids % 2).astype(np.uint8))


def states(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Every bit pattern of bf16 may occur, NaN and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    patterns = [torch.randint(-(2**15), 2**15, (length, ORIGIN.hidden), generator=generator) for length in lengths]
    return [pattern.to(torch.int16).view(torch.bfloat16) for pattern in patterns]


def captured(lengths: Sequence[int]) -> tuple[pa.Table, dict[str, list[torch.Tensor]]]:
    taps = {tap: states(lengths, seed) for seed, tap in enumerate(ORIGIN.taps)}
    final = states(lengths, 9)
    table = encode(ORIGIN, [sample(i, length) for i, length in enumerate(lengths)], taps, final)
    return table, {**{tap_column(tap): rows for tap, rows in taps.items()}, final_column(): final}


def bits(states: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = states.view(torch.int16).tolist()
    return rows


@settings(max_examples=30)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.data())
def test_states_come_back_bit_for_bit_from_a_table_and_from_its_slices(lengths: list[int], data: st.DataObject) -> None:
    table, stored = captured(lengths)
    start = data.draw(st.integers(0, len(lengths) - 1))
    part = table.slice(start, data.draw(st.integers(1, len(lengths) - start)))
    for name, rows in stored.items():
        for row in range(part.num_rows):
            assert bits(bf16_column(part, name, row, ORIGIN.hidden)) == bits(rows[start + row])


def test_a_row_holds_its_id_tokens_and_mask() -> None:
    table, _ = captured([3, 2])
    assert table.column("sample_id").to_pylist() == ["id-0", "id-1"]
    assert table.column("input_ids").to_pylist() == [[0, 1, 2], [1000, 1001]]
    assert table.column("loss_mask").to_pylist() == [b"\x00\x01\x00", b"\x00\x01"]


def test_a_table_survives_the_wire_with_its_origin() -> None:
    table, stored = captured([3, 5])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    received = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert received.equals(table)
    assert origin_of(received.schema) == ORIGIN
    assert bits(bf16_column(received, "tap_2", 1, ORIGIN.hidden)) == bits(stored["tap_2"][1])


def test_fp32_states_are_rounded_to_bf16_once() -> None:
    exact = torch.randn(4, ORIGIN.hidden, generator=torch.Generator().manual_seed(0))
    table = encode(ORIGIN, [sample(0, 4)], {tap: [exact] for tap in ORIGIN.taps}, [exact])
    assert bits(bf16_column(table, "final", 0, ORIGIN.hidden)) == bits(exact.bfloat16())


def test_the_schema_has_one_large_binary_per_tap_and_no_nulls() -> None:
    schema = schema_of(ORIGIN)
    assert schema.names == ["sample_id", "input_ids", "loss_mask", "tap_-1", "tap_2", "tap_5", "final"]
    assert [str(kind) for kind in schema.types] == [
        "string", "list<item: int32>", "binary", "large_binary", "large_binary", "large_binary", "large_binary",
    ]  # fmt: skip
    assert not any(field.nullable for field in schema)


def test_the_origin_round_trips_through_the_schema() -> None:
    assert origin_of(schema_of(ORIGIN)) == ORIGIN


def test_a_table_of_another_writer_has_no_origin() -> None:
    with pytest.raises(InputError, match="no origin"):
        origin_of(pa.schema([pa.field("x", pa.int32())]))


def test_a_table_of_another_format_version_is_refused() -> None:
    newer = schema_of(replace(ORIGIN, format_version=FORMAT_VERSION + 1))
    with pytest.raises(InputError, match=f"version {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"):
        origin_of(newer)


def test_a_cache_fits_a_run_that_needs_a_part_of_its_taps() -> None:
    ORIGIN.check_fits(ORIGIN, "the cache")
    ORIGIN.check_fits(replace(ORIGIN, taps=(2,)), "the cache")
    with pytest.raises(InputError, match=r"lacks taps \[3\] \(it holds \[-1, 2, 5\]\)"):
        ORIGIN.check_fits(replace(ORIGIN, taps=(2, 3)), "the cache")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "others"),
        ("render", "others"),
        ("hidden", 8),
        ("dtype", "fp32"),
        ("final", "pre_norm"),
        ("codec", "int8_outlier"),
        ("format_version", 7),
    ],
)
def test_a_mismatch_names_its_field_and_both_values(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        replace(ORIGIN, **{field: value}).check_fits(ORIGIN, "the cache")
    message = str(caught.value)
    assert f"{field}={value!r}" in message and repr(getattr(ORIGIN, field)) in message and "the cache" in message


@pytest.mark.parametrize("field", ["target", "revision"])
def test_a_target_of_other_weights_is_told_by_its_name_and_one_of_equal_weights_fits_under_any(field: str) -> None:
    change: dict[str, Any] = {field: "elsewhere"}
    moved = replace(ORIGIN, **change)
    moved.check_fits(ORIGIN, "the cache")
    with pytest.raises(InputError, match=f"{field}='elsewhere'"):
        replace(moved, fingerprint="others").check_fits(ORIGIN, "the cache")


def overflowing(bad: Sequence[int], rows: int) -> pa.Table:
    """Rows of one token whose first tap is infinite in the rows `bad`."""
    fine, infinite = torch.zeros(1, ORIGIN.hidden), torch.full((1, ORIGIN.hidden), -torch.inf)
    taps = {tap: [fine] * rows for tap in ORIGIN.taps}
    taps[-1] = [infinite if row in bad else fine for row in range(rows)]
    return encode(ORIGIN, [sample(row, 1) for row in range(rows)], taps, [fine] * rows)


def test_rows_that_are_not_finite_are_taken_out_and_a_run_of_them_over_tables_is_an_error() -> None:
    only_finite = OnlyFinite(limit=3)
    kept = only_finite(overflowing([1, 3, 4], rows=5))
    assert kept.column("sample_id").to_pylist() == ["id-0", "id-2"]
    whole = overflowing([], rows=2)
    assert only_finite(whole) is whole
    only_finite(overflowing([0, 3, 4], rows=5))
    with pytest.raises(InputError, match=r"3 samples in a row gave states that are not finite.*id-0 \(in tap_-1\)"):
        only_finite(overflowing([0], rows=2))


def test_a_fault_in_place_of_rows_fits_the_contract_and_whoever_takes_a_row_learns_the_reason() -> None:
    faulty = fault_table(ORIGIN, 3, "the disk is full")
    assert faulty.schema.equals(schema_of(ORIGIN), check_metadata=True) and faulty.num_rows == 3
    faulty.validate(full=True)
    with pytest.raises(InputError, match=r"^the disk is full$"):
        refuse_fault(faulty.slice(2))
    refuse_fault(overflowing([], rows=2))
