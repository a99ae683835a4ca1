"""What can be refused before a model is loaded: data that are not there, places that cannot be written. Knows no tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateur.errors import DataError, OutputError, SettingError, not_one_of
from secateur.files.places import check_file, check_folder
from secateur.selection import Selection
from secateur.settings import BUILTIN, KNOWN_DATA, LAYOUTS, MAP, NONE, Job, Settings, plain_path

FILE_SUFFIXES = (".txt", ".text", ".md", ".raw", ".tokens", ".json", ".jsonl", ".csv", ".parquet")


def check_prune(job: Job, out: Path | None) -> None:
    """Refuse a prune whose data are not there, or whose results have no place."""
    if out is not None and job.settings.layout != NONE:
        check_one_device(job.settings.device)
    if out is not None:
        check_folder(out)
        for data, option in ((job.settings.calibration, "--calibration"), (job.judging.data or "", "--data")):
            check_outside(out, data, option)
    if job.cutting.repair and (out is None or job.settings.layout == NONE):
        raise SettingError(
            "There is nothing to repair: no smaller model is written without a place for it, or with --layout none."
        )
    if job.healing.amount and (out is None or job.settings.layout == NONE):
        raise SettingError(
            "There is nothing to heal: no smaller model is written without a place for it, or with --layout none."
        )
    check_data(job.settings.calibration, "--calibration")
    check_data(job.judging.data or BUILTIN, "--data")
    _check_healing_data(job, out)


def check_select(job: Job, out: Path) -> None:
    """Refuse a choice whose data are not there, or whose file cannot be written."""
    check_file(out, "selection.json")
    check_outside(out, job.settings.calibration, "--calibration")
    check_data(job.settings.calibration, "--calibration")


def check_evaluate(job: Job, out: Path | None) -> None:
    """Refuse an evaluation on data that are not there, or whose file cannot be written."""
    if out is not None:
        check_file(out, "evaluation.json")
    check_data(job.judging.data or job.settings.calibration, "--data")


def check_shrink(job: Job, out: Path, layout: str) -> None:
    """Refuse a cut whose data are not there, or that has no place or no known layout."""
    if layout not in LAYOUTS:
        raise not_one_of("layout", layout, LAYOUTS)
    check_one_device(job.settings.device)
    check_folder(out)
    check_outside(out, job.settings.calibration, "--calibration")
    check_data(job.settings.calibration, "--calibration")
    _check_healing_data(job, out)


def check_heal(job: Job, small: Path, out: Path) -> None:
    """Refuse a healing whose data are not there, or that has no place of its own."""
    check_one_device(job.settings.device)
    check_folder(out)
    if os.path.realpath(out) == os.path.realpath(small):
        raise OutputError(f"{out} holds the model that is to be healed, and is not overwritten; choose another place with -o.")
    for data, option in ((job.settings.calibration, "--calibration"), (job.judging.data or BUILTIN, "--data")):
        check_outside(out, data, option)
        check_data(data, option)
    _check_healing_data(job, out)


def check_one_device(device: str) -> None:
    """Refuse to cut, heal or time a model whose blocks would lie on several devices."""
    if device == MAP:
        raise SettingError(
            f"A model is cut, healed and timed on one device, not with --device {MAP}: choose with `secateur select --device "
            f"{MAP}`, then cut with `secateur shrink --device cpu`."
        )


def _check_healing_data(job: Job, out: Path | None) -> None:
    if data := job.healing.data:
        check_data(data, "--heal-data")
        if out is not None:
            check_outside(out, data, "--heal-data")


def shared_settings(selection: Selection, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cut, with what it takes over from the search that chose its units."""
    known = selection.made_with.settings if selection.made_with else Settings("")
    shared = {name: getattr(known, name) for name in ("calibration", "seq_len", "batch_size", "seed", "loss")}
    return {**shared, **cut_as(selection, settings.get("calibration") or known.calibration), **settings}


def cut_as(selection: Selection | None, data: str) -> dict[str, Any]:
    """How the data that chose were cut and held out, if these are the same data."""
    made_with = selection.made_with if selection else None
    if made_with is None or made_with.settings.calibration != plain_path(data):
        return {}
    return {name: getattr(made_with.settings, name) for name in ("documents", "holdout")}


def check_outside(out: Path, data: str, option: str) -> None:
    """Refuse a place in a folder of data: what is written there would be read as data."""
    if os.path.isdir(data) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(data)):
        raise OutputError(
            f"{out} lies in {data}, which {option} names, and what is written there would be read as data; choose another "
            "place with -o."
        )


def check_data(name: str, option: str) -> None:
    """Refuse data that are neither here nor a name that the hub could know; only reading can tell whether the hub does."""
    if os.path.exists(name):
        if not (os.path.isfile(name) or os.path.isdir(name)):
            raise DataError(f"{name}, which {option} names, is neither a file nor a folder; data are read from these alone.")
        if not os.access(name, os.R_OK):
            raise DataError(f"Cannot read {name}, which {option} names: permission denied.")
        return
    a_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in FILE_SUFFIXES
    if name not in KNOWN_DATA and ("/" not in name or a_path):
        raise DataError(
            f"There are no data {name!r}, which {option} names: it is neither a file or folder nor one of "
            f"{', '.join(KNOWN_DATA)}, nor a hub data set written OWNER/NAME or OWNER/NAME:CONFIGURATION."
        )
