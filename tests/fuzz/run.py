"""The fuzzer: bad input of every kind through every command. Prints what was tried and answered rightly, per kind.

Answered rightly is a success, or one sentence and exit code 2. `make fuzz` runs all of it, `make test` a part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}.items():
    os.environ[name] = value  # before any library is imported
sys.path[1:1] = [str(Path(__file__).parents[1])]  # the shared models and data of the tests

from secateur.model.loading import mend_torchvision  # noqa: E402

mend_torchvision()  # before transformers and timm are imported

import secateur  # noqa: E402

os.environ["PYTHONPATH"] = str(Path(secateur.__file__).parents[1])  # workers in other processes take the same one

import forks  # noqa: E402
from kills import KILLED, run_kills  # noqa: E402
from kinds import KINDS, Good, make_good, run_argument_case, run_file_case, run_place_case  # noqa: E402

ARGUMENTS, PLACES = "arguments", "places"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="cases of each kind of file; twice as many of arguments")
    parser.add_argument("--kills", type=int, default=200, help="kills in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only the kinds with this in their name")
    parser.add_argument("--report", type=Path, help="a file for each defect, as JSON lines")
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="secateur-fuzz-") as folder:
        root = Path(folder)
        good = prepare(root)
        tallies = [
            fuzz(name, good, root, asked) for name in (*(kind.name for kind in KINDS), ARGUMENTS, PLACES) if asked.only in name
        ]
        tallies += [kill(name, good, root, asked) for name in KILLED if asked.only in name]
    show(tallies, time.monotonic() - started)
    defects = [defect for tally in tallies for defect in tally["defects"]]
    if asked.report:
        asked.report.write_text("".join(json.dumps(defect) + "\n" for defect in defects))
    return 1 if defects else 0


def prepare(root: Path) -> Good:
    """The good files, made in a fork; what that imported is then imported here."""
    (root / "good").mkdir()
    modules = root / "modules.json"
    made = forks.call(lambda: modules.write_text(json.dumps(make_good(root / "good"))), root)
    if made.code != 0:
        raise SystemExit(f"The good files cannot be made:\n{made.out}\n{made.err}")
    forks.import_all(json.loads(modules.read_text()))
    return Good(root / "good")


def fuzz(name: str, good: Good, root: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The cases of one kind."""
    kind = next((kind for kind in KINDS if kind.name == name), None)
    n_cases = asked.cases if kind else 2 * asked.cases
    defects = []
    for number in range(n_cases):
        rng = random.Random(f"{name} {asked.seed} {number}")
        place = root / "case"
        place.mkdir()
        if kind:
            command, ran, problem = run_file_case(kind, good, place, rng)
        else:
            command, ran, problem = (run_argument_case if name == ARGUMENTS else run_place_case)(good, place, rng)
        if problem:
            defects.append(
                {
                    "kind": name,
                    "number": number,
                    "problem": problem,
                    "command": list(map(repr, command)),
                    "err": ran.err[-3000:],
                }
            )
            print(f"{name} {number}: {problem}", file=sys.stderr, flush=True)
        shutil.rmtree(place)
    return {"kind": name, "tried": n_cases, "defects": defects}


def kill(name: str, good: Good, root: Path, asked: argparse.Namespace) -> dict[str, Any]:
    n_kills = round(KILLED[name].share * asked.kills)
    defects = []
    if n_kills:
        place = root / "kills"
        place.mkdir()
        for number, problem in enumerate(run_kills(name, n_kills, good, place, random.Random(f"{name} {asked.seed}"))):
            if problem:
                defects.append({"kind": name, "number": number, "problem": problem})
                print(f"{name} {number}: {problem}", file=sys.stderr, flush=True)
        shutil.rmtree(place)
    return {"kind": name, "tried": n_kills, "defects": defects}


def show(tallies: list[dict[str, Any]], seconds: float) -> None:
    width = max(len(tally["kind"]) for tally in tallies)
    print(f"{'kind':{width}}  tried  answered rightly")
    rows = [(tally["kind"], tally["tried"], tally["tried"] - len(tally["defects"])) for tally in tallies if tally["tried"]]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for kind, tried, right in rows:
        print(f"{kind:{width}}  {tried:5}  {right:16}")
    print(f"{seconds:.0f} seconds")


if __name__ == "__main__":
    sys.exit(main())
