from __future__ import annotations

import pytest

from secateur.errors import DataError, ModelError, first_line, reasons

READING = "The file x cannot be read"


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


def test_whatever_a_library_raises_becomes_an_error_of_ours_with_its_reason() -> None:
    with (
        pytest.raises(DataError, match=r"^The file x cannot be read: 'moon' is missing") as caught,
        reasons(DataError, READING),
    ):
        raise KeyError("moon")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [ModelError("ours"), MemoryError(), RuntimeError("CUDA out of memory."), KeyboardInterrupt()])
def test_our_own_errors_a_full_memory_and_an_interruption_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reasons(DataError, READING):
        raise error
    assert caught.value is error
