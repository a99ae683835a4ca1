from __future__ import annotations

import pytest

from secateur.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\n  the size is 3\nand more"), "the size is 3."),
        (ValueError("Is it?"), "Is it?"),
        (ValueError(""), "ValueError."),
        (ValueError("Error of 'n_layer':\n    TypeError: 'three'"), "Error of 'n_layer': TypeError: 'three'."),
        (ValueError("Nothing follows:"), "Nothing follows."),
        (KeyError("architecture"), "'architecture' is missing, or is no name that is known."),
        (IndexError("list index out of range"), "something in it is missing (list index out of range)."),
        (ValueError("x" * 300), "x" * 237 + "..."),
    ],
)
def test_another_librarys_error_becomes_a_sentence_that_keeps_its_reason(error: Exception, said: str) -> None:
    assert first_line(error) == said
