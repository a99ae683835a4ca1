from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from fakes import POLICIES, FakeMeter, spread, written
from secateur.errors import OutputError
from secateur.files.journal import Journal
from secateur.search.policies import PULLS, UCB, Auto, Budget, Greedy, Policy, Thompson
from secateur.search.select import select
from secateur.selection import Selection
from secateur.units import enumerate_units
from secateur.watcher import Watcher
from worlds import Listener

SETTINGS: dict[str, Any] = {"model": "fake-ü", "ratio": 0.2, "temperature": 0.02, "screen": None, "shape": (2, 3)}
UNITS = enumerate_units([4] * 4, [], target="head")
DAMAGES = spread(UNITS)
ONE_BROKEN = DAMAGES | {UNITS[5]: math.nan}
AUTO = Auto(Budget(40, PULLS))


def run(path: Path, *, policy: Policy, meter: FakeMeter, pulls: int = 8, watcher: Watcher | None = None) -> Selection:
    with Journal(path, SETTINGS) as journal:
        return select(meter, UNITS, policy=policy, ratio=0.2, pulls_per_step=pulls, seed=42, journal=journal, watcher=watcher)


def plain(policy: Policy, pulls: int = 8) -> Selection:
    """The same run, neither interrupted nor journalled."""
    return select(FakeMeter(DAMAGES), UNITS, policy=policy, ratio=0.2, pulls_per_step=pulls, seed=42)


def stopped(path: Path, policy: Policy, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(path, policy=policy, meter=FakeMeter(DAMAGES, stop_at=after))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_journal_changes_nothing_and_holds_the_settings_and_every_pull(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "journal.jsonl"
    selection = run(path, policy=policy, meter=FakeMeter(DAMAGES))
    assert selection == plain(policy)
    header, *records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({record.pop("checksum") for record in (header, *records)}) == 1 + len(records)
    assert header == {"settings": {**SETTINGS, "shape": [2, 3]}}
    assert records == json.loads(written(selection))["trace"]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_run_interrupted_at_any_pull_goes_on_to_the_same_selection_and_measures_nothing_twice(
    policy: Policy, tmp_path: Path
) -> None:
    whole = plain(policy)
    for cut in range(whole.pulls):
        path = tmp_path / f"{cut}.jsonl"
        stopped(path, policy, after=cut)
        meter = FakeMeter(DAMAGES)
        again = run(path, policy=policy, meter=meter)
        assert again == whole
        assert again.forwards == whole.forwards
        assert meter.measured == [pull.unit for pull in whole.trace[cut:]]
        assert meter.forwards == sum(pull.forwards for pull in whole.trace[cut:])
        assert meter.committed == list(whole.units)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_run_interrupted_after_every_single_pull_reaches_the_same_selection(policy: Policy, tmp_path: Path) -> None:
    whole = plain(policy)
    for _ in range(whole.pulls - 1):
        stopped(tmp_path / "journal.jsonl", policy, after=1)
    meter = FakeMeter(DAMAGES)
    assert run(tmp_path / "journal.jsonl", policy=policy, meter=meter) == whole
    assert meter.measured == [whole.trace[-1].unit]


def test_a_finished_run_started_again_measures_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / "journal.jsonl", policy=UCB(), meter=FakeMeter(DAMAGES))
    before = (tmp_path / "journal.jsonl").read_bytes()
    meter = FakeMeter(DAMAGES)
    assert run(tmp_path / "journal.jsonl", policy=UCB(), meter=meter) == first
    assert meter.measured == []
    assert (tmp_path / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_run_with_a_broken_unit_interrupted_at_any_pull_goes_on_to_the_same_selection(policy: Policy, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.jsonl", policy=policy, meter=FakeMeter(ONE_BROKEN), pulls=12)
    assert whole.nonfinite_pulls > 0
    for cut in range(whole.pulls):
        path = tmp_path / f"{cut}.jsonl"
        with pytest.raises(KeyboardInterrupt):
            run(path, policy=policy, meter=FakeMeter(ONE_BROKEN, stop_at=cut), pulls=12)
        assert written(run(path, policy=policy, meter=FakeMeter(ONE_BROKEN), pulls=12)) == written(whole)


def test_progress_says_which_pulls_were_made_before(tmp_path: Path) -> None:
    stopped(tmp_path / "journal.jsonl", UCB(), after=10)
    listener = Listener()
    run(tmp_path / "journal.jsonl", policy=UCB(), meter=FakeMeter(DAMAGES), watcher=listener)
    assert [told.replayed for told in listener.pulls] == [True] * 10 + [False] * 14


@pytest.mark.parametrize("policy", [UCB(), Greedy(), AUTO], ids=repr)
def test_a_run_interrupted_in_the_middle_of_a_whole_request_measures_the_rest_of_it_and_no_more(
    policy: Policy, tmp_path: Path
) -> None:
    """Each begins a step with a request for several pulls."""
    unbroken = FakeMeter(DAMAGES)
    whole = run(tmp_path / "whole.jsonl", policy=policy, meter=unbroken)
    first = len(unbroken.requests[0])
    assert first > 3
    second = next(i for i, request in enumerate(unbroken.requests) if i > 0 and len(request) > 3)  # of the second step
    before = sum(map(len, unbroken.requests[:second]))
    for at, number in ((1, 0), (first - 1, 0), (before + 2, second)):
        path = tmp_path / f"{at}.jsonl"
        stopped(path, policy, after=at)
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + at  # each pull was written when it was made
        meter, listener = FakeMeter(DAMAGES), Listener()
        assert run(path, policy=policy, meter=meter, watcher=listener) == whole
        made = at - sum(map(len, unbroken.requests[:number]))
        assert meter.requests == [unbroken.requests[number][made:], *unbroken.requests[number + 1 :]]
        assert [told.replayed for told in listener.pulls] == [True] * at + [False] * (whole.pulls - at)
        assert meter.draws == unbroken.draws


def test_a_run_interrupted_between_two_requests_asks_for_the_next_one_whole(tmp_path: Path) -> None:
    unbroken, meter = FakeMeter(DAMAGES), FakeMeter(DAMAGES)
    whole = run(tmp_path / "whole.jsonl", policy=AUTO, meter=unbroken)
    stopped(tmp_path / "journal.jsonl", AUTO, after=len(unbroken.requests[0]))
    assert run(tmp_path / "journal.jsonl", policy=AUTO, meter=meter) == whole
    assert meter.requests == unbroken.requests[1:]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [UCB(), Thompson(), Greedy(), Auto(Budget(16, PULLS))], ids=repr)
def test_a_journal_cut_at_any_byte_goes_on_to_the_same_selection_and_the_same_journal(policy: Policy, tmp_path: Path) -> None:
    whole = plain(policy, pulls=2)
    path = tmp_path / "journal.jsonl"
    assert run(path, policy=policy, meter=FakeMeter(DAMAGES), pulls=2) == whole
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    for length in [*range(header + 1), *range(header + 1, len(content), 5), len(content) - 1, len(content)]:
        path.write_bytes(content[:length])
        meter = FakeMeter(DAMAGES)
        assert run(path, policy=policy, meter=meter, pulls=2) == whole
        assert path.read_bytes() == content
        assert len(meter.measured) == whole.pulls - max(0, content[:length].count(b"\n") - 1)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("temperature", 0.05, "temperature.*0.02.*0.05"),
        ("model", "other", 'model.*fake.*"other"'),
        ("screen", 48, "screen.*null.*48"),
        ("shape", (3, 2), r"shape.*\[2, 3\].*\[3, 2\]"),
        ("new setting", 1, "new setting.*null.*1"),
        ("ratio", math.nan, 'ratio.*0.2.*"nan"'),
    ],
)
def test_the_journal_of_a_run_with_other_settings_is_refused_and_the_setting_is_named(
    name: str, value: Any, shown: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    stopped(path, UCB(), after=5)
    before = path.read_bytes()
    with pytest.raises(OutputError, match=shown):
        Journal(path, SETTINGS | {name: value})
    assert path.read_bytes() == before


def test_a_policy_that_makes_other_pulls_than_the_journal_holds_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "journal.jsonl", UCB(), after=5)
    with pytest.raises(OutputError, match=r"Line \d+ "):
        run(tmp_path / "journal.jsonl", policy=Greedy(), meter=FakeMeter(DAMAGES), pulls=7)


@pytest.mark.parametrize(
    "edited",
    [
        lambda pull: pull | {"step": 1},
        lambda pull: pull | {"unit": {"kind": "head", "layer": 99, "index": 0}},
        lambda pull: pull | {"batches": [98, 99]},
        lambda pull: {key: value for key, value in pull.items() if key != "unit"},
        lambda pull: {key: value for key, value in pull.items() if key != "damage"},
        lambda pull: pull | {"damage": "little"},
        lambda pull: pull | {"base_losses": None},
        lambda pull: pull | {"base_losses": pull["base_losses"][:1]},
        lambda pull: {},
        lambda pull: [pull],
        lambda pull: 5,
        lambda pull: None,
    ],
    ids=[
        "other step",
        "other unit",
        "other batches",
        "no unit",
        "no damage",
        "a word for the damage",
        "no base losses",
        "a base loss too few",
        "empty",
        "list",
        "number",
        "null",
    ],
)
def test_an_edited_pull_is_refused_by_its_line(edited: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    stopped(path, UCB(), after=5)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps(edited(json.loads(lines[3])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(OutputError, match="Line 4 "):
        run(path, policy=UCB(), meter=FakeMeter(DAMAGES))


def test_a_line_lost_from_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    stopped(path, UCB(), after=5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(OutputError, match="Line 3 "):
        run(path, policy=UCB(), meter=FakeMeter(DAMAGES))


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\nof last week\n",
        b"my notes\nof last week",
        b"my notes",
        b'{"model": "gpt2"}',
        b"\x00\xff\n\x00",
        b"\n",
        b"5\n",
        b"[]\n",
        b'{"model": "gpt2"}\n',
        b'{"settings": 5}\n',
        b'{"settings": null}\n',
        b'{"settings": {}}\nnot JSON\n',
    ],
    ids=repr,
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_was(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"journal\.jsonl"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content


def test_the_torn_journal_of_another_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    stopped(path, UCB(), after=5)
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    with pytest.raises(OutputError, match="another run"):
        Journal(path, SETTINGS | {"temperature": 0.05})
    assert path.read_bytes() == torn


def test_a_journal_that_another_run_holds_is_refused_until_it_lets_go(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as held:
        with pytest.raises(OutputError, match=r"(?i)another run.*journal\.jsonl"):
            Journal(path, SETTINGS)
        held.append({"step": 0})
    with Journal(path, SETTINGS) as journal:
        assert journal.n_replayed == 1


@pytest.mark.parametrize("place", ["file/journal.jsonl", "file/deeper/journal.jsonl", "folder"])
def test_a_journal_in_a_place_that_cannot_be_written_is_an_output_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=f"write.*{place}"):
        Journal(tmp_path / place, SETTINGS)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_fills_up_is_an_output_error_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "journal.jsonl"
    stopped(path, Thompson(), after=5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        with pytest.raises(OutputError, match=r"write.*journal\.jsonl"):
            run(path, policy=Thompson(), meter=FakeMeter(DAMAGES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run(path, policy=Thompson(), meter=FakeMeter(DAMAGES)) == plain(Thompson())


KILLED = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fakes import FakeMeter, spread
from secateur.files.journal import Journal
from secateur.search.policies import Thompson
from secateur.search.select import select
from secateur.units import enumerate_units

class Hanging(FakeMeter):
    def stop(self):
        time.sleep(600)

units = enumerate_units([4] * 4, [], target="head")
with Journal(Path(sys.argv[2]), json.loads(sys.argv[3])) as journal:
    meter = Hanging(spread(units), stop_at=11)
    select(meter, units, policy=Thompson(), ratio=0.2, pulls_per_step=8, seed=42, journal=journal)
"""


def test_a_run_killed_outright_goes_on_to_the_same_selection(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    shared = str(Path(fakes.__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", KILLED, shared, str(path), json.dumps(SETTINGS)])
    try:
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < 12:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run never wrote its eleventh pull"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    meter = FakeMeter(DAMAGES)
    assert run(path, policy=Thompson(), meter=meter) == plain(Thompson())
    assert len(meter.measured) == 24 - 11


def test_a_number_that_was_found_once_is_the_same_for_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {}) as journal:
        assert journal.fact("forwards", lambda: 812) == 812
    with Journal(path, {}) as journal:
        assert journal.n_replayed == 0  # it is no pull
        assert journal.fact("forwards", lambda: 99) == 812
    with Journal(path, {}) as journal, pytest.raises(OutputError, match="edited"):
        journal.fact("backwards", lambda: 1)
