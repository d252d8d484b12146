"""Raw rows of a dataset on the hub, through the `datasets` package where it is installed."""

from collections.abc import Iterator
from typing import Any

from dspark.data.files import without_nulls
from dspark.errors import InputError


def hub_rows(name: str, subset: str | None, split: str) -> Iterator[tuple[int, Any]]:
    """(row number, raw row) of a dataset, read as it streams in.

    Raises:
        InputError: the package is not installed, or there is no such dataset, subset or split.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"prepare.source={name!r} is neither a file nor a folder, and a dataset on the hub needs the package "
            "`datasets`, which is not installed: run `pip install datasets`, or give the path of a file"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # the package raises whatever its many back ends raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"prepare.source={name!r} with prepare.subset={subset!r}, prepare.split={split!r} could not be opened on "
            f"the hub: {reason}; correct them, or give the path of a file"
        ) from error
    return ((number, without_nulls(row)) for number, row in enumerate(rows, start=1))
