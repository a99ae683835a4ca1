"""Rows as a pandas data frame, for notebooks; pandas is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secateur.errors import MissingExtra


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A data frame with a line for each row."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", "notebook", "A data frame") from error
    return pandas.DataFrame(list(rows))
