"""Raw rows of a dataset on the hub, through the `datasets` package where it is installed."""

from collections.abc import Iterable, Iterator
from typing import Any

from dspark.data.files import without_nulls
from dspark.errors import InputError


def hub_rows(name: str, subset: str | None, split: str) -> Iterator[tuple[int, Any]]:
    """(row number, raw row) of a dataset, read as it streams in.

    Raises:
        InputError: the package is not installed, or there is no such dataset, subset or split.
    """
    asked = f"prepare.source={name!r} with prepare.subset={subset!r}, prepare.split={split!r}"
    return streamed(asked, "correct them, or give the path of a file", name, subset, split=split)


def streamed(asked: str, remedy: str, *names: str | None, **options: Any) -> Iterator[tuple[int, Any]]:
    """Numbered raw rows of `datasets.load_dataset(*names, **options)`; errors name what was `asked` and the `remedy`.

    Raises:
        InputError: as `hub_rows`.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{asked}: a dataset on the hub needs the package `datasets`, which is not installed: run "
            f"`pip install datasets`; or {remedy}"
        ) from None
    try:
        rows = datasets.load_dataset(*names, **options, streaming=True)
    except Exception as error:  # the package raises whatever its many back ends raise
        raise InputError(f"{asked} could not be opened on the hub: {_first_line(error)}; {remedy}") from error
    return _numbered(rows, asked)


def _numbered(rows: Iterable[Any], asked: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, without_nulls(row)
    except Exception as error:
        raise InputError(
            f"{asked} broke off on the hub after row {number}: {_first_line(error)}; try again, or download it"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
