"""Every error a user can cause, in one tree.

    SecateurError
    ├── SettingError        a setting that cannot work: a ratio of 1.5, an unknown method
    ├── MissingExtra        an optional package that this request needs
    ├── ModelError          a model that cannot be found or read
    │   └── UnsupportedModel    a model of no known family
    ├── DataError           text or images that are missing, broken, too few, or used twice
    ├── SelectionError      a selection that cannot be read, or was made for another model
    ├── ProofError          a cut model that does not compute what the zeroed one does
    ├── StoreError          a store of records that is missing, damaged, or edited
    └── OutputError         a place that cannot be written, or that holds another run's work

Each message is one sentence or two: what is wrong, where, and what to do. The command line prints it and exits with 2.
"""

import contextlib
import difflib
from collections.abc import Collection, Iterator


class SecateurError(Exception):
    """The root: catch this to catch every error that Secateur raises on purpose.

    >>> try:
    ...     load("no/such/folder")
    ... except SecateurError as error:
    ...     print(error)
    """


class SettingError(SecateurError):
    """A setting that cannot work."""


def not_one_of(what: str, value: str, allowed: Collection[str]) -> SettingError:
    """The error for a word that is not allowed; it lists the allowed words and suggests the nearest."""
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return SettingError(f"The {what} is {value!r}, but must be one of {', '.join(allowed)}.{hint}")


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, as a sentence; with the next one, if it ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((" ".join(lines[: n + 1]) for n in range(len(lines)) if not lines[n].endswith(":")), lines[0].rstrip(":"))
    if isinstance(error, KeyError):  # whose message is the bare key
        line = f"{line} is missing, or is no name that is known"
    elif isinstance(error, IndexError):
        line = f"something in it is missing ({line})"
    line = line if len(line) <= 240 else line[:237] + "..."
    return line if line.endswith((".", "!", "?")) else line + "."


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on this machine or on a device."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


@contextlib.contextmanager
def reasons(kind: type[SecateurError], what: str) -> Iterator[None]:
    """While the block lasts, whatever another library raises becomes an error of a kind: what failed, and the library's reason.

    >>> with reasons(DataError, "The image cannot be read"):
    ...     image.load()
    """
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:  # libraries raise all kinds, down to KeyError and ZeroDivisionError, of what they cannot use
        if out_of_memory(error):
            raise
        raise kind(f"{what}: {first_line(error)}") from error


class MissingExtra(SecateurError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the package {package!r}: pip install {package} (Secateur's extra {extra!r}).")


class ModelError(SecateurError):
    """A model that cannot be found or read."""


class UnsupportedModel(ModelError):
    """A model of no known family."""


class DataError(SecateurError):
    """Text or images that are missing, broken, too few, or used twice."""


class SelectionError(SecateurError):
    """A selection that cannot be read, or was made for another model."""


class ProofError(SecateurError):
    """A cut model that does not compute what the zeroed one does."""


class StoreError(SecateurError):
    """A store of records that is missing, damaged, or edited."""


class OutputError(SecateurError):
    """A place that cannot be written, or that holds another run's work."""
