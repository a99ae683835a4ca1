"""What docs/results.md says in words, and in its first table, is what the stores hold.

A claim is a piece of the page with its numbers computed from the stores and from the paper's tables. Every claim must stand on
the page, and every other digit of the page's prose must be a name or a setting that is listed here: a number that is changed,
or added without a claim, fails.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from secateur.experiment.compare import LANGUAGE, Comparison, compare, excludes_zero, summary
from secateur.experiment.paper import paper_row, spread_of
from secateur.experiment.store import Cell, Record, Table, cells_of, read_store, read_tables
from secateur.methods import label
from worlds import ROOT

DEIT, SMOLLM2, ABLATIONS = (read_tables(ROOT / "results" / name) for name in ("deit", "smollm2", "ablations"))
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
PAPERS_SEEDS = ("1", "2", "3", "42", "123")


def cell(tables: list[Table], number: str, **vary: object) -> Cell:
    return next(cell for cell in cells_of(tables, number) if cell.vary == vary)


NINE, EIGHT = cell(DEIT, "9"), cell(DEIT, "8")
FOUR, SEVEN, SIX = (cell(SMOLLM2, number) for number in ("4", "7", "6"))


def mean(place: Cell, method: str, name: str) -> float:
    spread = place.spread(method, name)
    assert spread and spread.valid == spread.planned
    return spread.mean


def theirs(number: str, method: str, column: str) -> tuple[float, float]:
    """The paper's mean and deviation for DeiT-Tiny."""
    key = ("DeiT-Tiny", "0.10", label(method)) if number == "A4" else ("DeiT-Tiny", label(method))
    row = paper_row(number, *key)
    found = spread_of(row[column]) if row else None
    assert found
    return found


def layers(place: Cell, method: str) -> list[int]:
    (record,) = place.valid(method).values()
    assert record.judgement
    return sorted(unit.layer for unit in record.judgement.units)


def units(place: Cell, method: str, seed: str) -> set[str]:
    judgement = place.valid(method)[seed].judgement
    assert judgement
    return {f"{unit.layer}.{unit.index}" for unit in judgement.units}


def against(family: list[Comparison], baseline: str) -> list[Comparison]:
    return [c for c in family if c.baseline == baseline]


def excluding(comparisons: list[Comparison], name: str) -> int:
    return sum(excludes_zero(getattr(c.result, name)) for c in comparisons)


def n_runs(store: str) -> int:
    return len(read_store(ROOT / "results" / store)[0])


def of_two_workers(records: list[Record]) -> str:
    """The time of two workers that do all of these records; a choice that is judged twice is made once."""
    choices = {record.choice_key: record.selection_seconds for record in records}
    minutes = round((sum(choices.values()) + sum(record.evaluation_seconds for record in records)) / 2 / 60)
    return f"{minutes // 60} h {minutes % 60} min"


# DeiT-Tiny


def test_what_the_words_about_deit_say_of_order() -> None:
    for place, number in ((NINE, "9"), (EIGHT, "8")):
        drops = {method: mean(place, method, "delta_top1") for method in place.runs}
        assert min(drops["ucb"], drops["ts"]) > drops["greedy"]
        assert drops["greedy"] > max(mean(NINE, "magnitude", "delta_top1"), mean(NINE, "random", "delta_top1"))
        assert all(drops[m] < theirs(number, m, "Δ Top-1")[0] for m in drops if m not in ("wanda", "taylor", "fisher"))
    assert {record.settings.seed for m in ("wanda", "taylor", "fisher") for record in NINE.records(m)} == {1}
    assert len({frozenset(units(NINE, "fisher", seed)) for seed in PAPERS_SEEDS}) == 1
    assert {record.settings.batches_per_pull for m in ("ucb", "ts", "greedy") for record in NINE.records(m)} == {1}


def deit() -> list[str]:
    def edge(number: str, method: str) -> float:
        middle, deviation = theirs(number, method, "Δ Top-1")
        return middle - 2 * deviation

    def gap(number: str, method: str) -> float:
        return 100 * (theirs(number, method, "Δ Top-1")[0] - theirs(number, "greedy", "Δ Top-1")[0])

    top1 = {method: mean(NINE, method, "delta_top1") for method in NINE.runs}
    loss = {method: mean(NINE, method, "delta_loss") for method in NINE.runs}
    ahead = {method: 100 * (top1[method] - top1["greedy"]) for method in ("ucb", "ts")}
    dense = NINE.spread("ucb", "dense.top1")
    papers_dense = theirs("9", "ucb", "Dense Top-1")
    assert dense and dense.deviation
    assert edge("9", "ts") < top1["ts"] and top1["ucb"] < edge("9", "ucb")
    assert all(edge("8", method) < top1[method] for method in ("ucb", "ts"))
    worst = min(NINE.valid("random").items(), key=lambda item: item[1].figure("delta_top1"))
    assert worst[0] == "2" and {"1.0", "1.1"} < units(NINE, "random", "2")
    papers = {method: theirs("A4", method, "Δ loss")[0] for method in ("ucb", "ts", "greedy", "magnitude")}
    (judged,) = {(len(units(NINE, "ucb", "1")), r.judgement.candidates) for r in NINE.records() if r.judgement}
    return [
        f"{judged[0]} of {judged[1]} heads, {WORDS[len(NINE.seeds())]} seeds, {n_runs('deit')} runs",
        f"({dense.deviation:.4f} and {papers_dense[1]:.4f})",
        f"({ahead['ucb']:.1f} points for UCB, {ahead['ts']:.1f} for TS; the paper's Table 9 has {gap('9', 'ucb'):.1f} and "
        f"{gap('9', 'ts'):.1f}, its Table 8 {gap('8', 'ucb'):.1f} and {gap('8', 'ts'):.1f})",
        f"TS is within two of the paper's standard deviations ({top1['ts']:.4f}, the edge is {edge('9', 'ts'):.4f}) and UCB is "
        f"not ({top1['ucb']:.4f}, the edge is {edge('9', 'ucb'):.4f})",
        f"(the edges are {edge('8', 'ucb'):.4f} for UCB and {edge('8', 'ts'):.4f} for TS)",
        f"the dense model differ ({dense.mean:.4f} against {papers_dense[0]:.4f})",
        f"its loss rises as in the paper ({loss['magnitude']:+.4f} against {papers['magnitude']:+.4f}), as its Top-5 falls "
        f"({mean(NINE, 'magnitude', 'delta_top5'):.4f} against {theirs('A4', 'magnitude', 'Δ Top-5')[0]:.4f}); only its Top-1 "
        f"falls further ({top1['magnitude']:.4f} against {theirs('9', 'magnitude', 'Δ Top-1')[0]:.4f})",
        f"UCB's loss rises by {loss['ucb']:+.4f} where the paper's rises by {papers['ucb']:+.4f}, TS's by {loss['ts']:+.4f} "
        f"where it is {papers['ts']:+.4f}, and greedy's by {loss['greedy']:+.4f} where it is {papers['greedy']:+.4f}",
        f"seed 2 drew heads 1.0 and 1.1, and falls to {worst[1].figure('zeroed.top1'):.4f}",
        f"do badly here ({top1['wanda']:.3f}, {top1['fisher']:.3f})",
    ]


def deit_tests() -> list[str]:
    family = compare(DEIT)
    four = against(family, "greedy")
    counts = summary(four, family)
    equal = sum(units(NINE, "greedy", seed) == units(EIGHT, "greedy", seed) for seed in NINE.seeds())
    p = [c.result.t_p for c in four]
    below = [-c.batch_mean for c in four]
    assert (
        min(c.q for c in four) > 0.05 and len({round(c.q, 2) for c in four}) == len({round(c.q_claimed, 2) for c in four}) == 1
    )
    assert all(excludes_zero(c.batch_interval) for c in four)
    return [
        f"Greedy's units are equal in Tables 8 and 9 in {WORDS[equal]} seeds of five, so that the {WORDS[len(four)]} "
        f"comparisons with it are {WORDS[counts.tests]} tests",
        f"{counts.percentile} of {len(four)} percentile intervals exclude zero, {counts.bca} of {len(four)} BCa intervals and "
        f"{counts.t} of {len(four)} t intervals; p is {min(p):.2f} to {max(p):.2f}",
        f"q is {four[0].q:.2f} in the family of {counts.family} tests, and {four[0].q_claimed:.2f} among the {counts.claimed} "
        "against greedy and random",
        "the paper counts 23 of 28 of",  # Table 11
        f"the bandits' loss is {min(below):.2f} to {max(below):.2f} below greedy's",
    ]


# SmolLM2-135M


def smollm2() -> list[str]:
    change = {method: mean(FOUR, method, "ppl_change_percent") for method in FOUR.runs}
    groups = {method: mean(SIX, method, "ppl_change_percent") for method in SIX.runs}
    records = read_store(ROOT / "results" / "smollm2")[0].values()
    grid = [record for record in records if record.grid == "here-smollm2"]
    heads, mlp = (next(r.judgement for r in place.records() if r.judgement) for place in (FOUR, SIX))
    screened = {name: cell(SMOLLM2, "ablation", screen_by=name) for name in ("none", "magnitude", "fisher")}
    by_fisher = [record.figure("ppl_change_percent") for record in screened["fisher"].valid("ucb").values()]
    first = [layer for layer in layers(FOUR, "magnitude") if layer < 8]
    fishers = layers(FOUR, "fisher")
    assert min(change.values()) == change["fisher"] and max(change.values()) == change["wanda"]
    assert all(
        mean(place, b, "ppl_change_percent") < mean(place, "greedy", "ppl_change_percent")
        for place in (FOUR, SEVEN)
        for b in ("ucb", "ts")
    )
    assert fishers[0] < 15 <= fishers[1] and fishers[-1] == 29  # but for one, of blocks 15 to 29
    assert max(by_fisher) < change["fisher"]
    assert 4.5 < mean(screened["magnitude"], "ucb", "ppl_change_percent") / statistics.fmean(by_fisher) < 5
    (evals,) = {record.figure("pulls") for place in screened.values() for record in place.records("ucb")}
    (passes,) = {record.score_passes for record in screened["fisher"].records("ucb")}
    worst = Counter(max(entries, key=lambda name: entries[name]) for entries in papers_table_4())
    return [
        f"{len(heads.units)} of its {heads.candidates} heads, and {len(mlp.units)} of its {mlp.candidates:,} MLP groups",
        f"{len(grid)} runs, {of_two_workers(grid)} of two workers by the records",
        f"Here Fisher is, and by far: {change['fisher']:.2f}% where UCB has {change['ucb']:.2f}% (Table 5: "
        f"{change['fisher'] - change['ucb']:.2f} points of advantage)",
        f"({groups['greedy']:.2f}% against {groups['ucb']:.2f}% and {groups['ts']:.2f}%",
        f"{len(first)} of the {len(heads.units)} heads it ranks lowest are in the first eight of 30 blocks, and without the "
        f"{len(heads.units)} perplexity is {change['magnitude']:.0f}% up",
        "Fisher takes heads of blocks 15 to 29, but for one",
        f"at the same {evals:.0f} evaluations",
        f"some {int(2 * heads.candidates**0.5)} of the {heads.candidates} heads",
        f"({passes} batches with gradients, beside the evaluations)",
        f"({by_fisher[0]:.2f}%, {by_fisher[1]:.2f}%, {by_fisher[2]:.2f}%; Fisher {change['fisher']:.2f}%)",
        f"`--screen-by fisher` is worth its {passes} passes",
        f"in {WORDS[worst['Wanda-style'] + worst['Magnitude']]} of the paper's {WORDS[worst.total()]} rows it is that or "
        "magnitude",
    ]


def papers_table_4() -> list[dict[str, float]]:
    models = ["gpt2", "gpt2-medium", "facebook/opt-125m", "facebook/opt-350m", "EleutherAI/pythia-160m"]
    rows = [paper_row("4", model) for model in [*models, "EleutherAI/pythia-410m", "Qwen/Qwen2.5-0.5B"]]
    return [{name: found[0] for name, entry in row.items() if (found := spread_of(entry))} for row in rows if row]


def smollm2_tests() -> list[str]:
    family = compare([table for table in SMOLLM2 if table.number in LANGUAGE])
    six = against(family, "greedy")
    counts = summary(six, family)
    (best,) = (c for c in six if c.q < 0.05)
    assert (best.method, best.cell.data, best.cell.target) == ("ucb", "WikiText-2", "head") and best.q_claimed < 0.05
    assert all(best.result.t_p > 0.05 for best in six if best.cell.target == "mlp")
    low, high = best.result.t
    return [
        f"{best.result.mean:.1f} points, t interval {low:.1f} to {high:.1f}, p {best.result.t_p:.4f}, q {best.q:.4f} in the "
        f"family of {counts.family} language tests ({best.q_claimed:.4f} among the {counts.claimed} against greedy and random)",
        f"the one of {WORDS[len(six)]} comparisons that survives the correction; {WORDS[counts.percentile]} percentile and "
        f"{WORDS[counts.bca]} BCa intervals of {WORDS[len(six)]} exclude zero and {WORDS[counts.t]} t interval does",
    ]


# The ablations


def ablations() -> list[str]:
    usual = cell(ABLATIONS, "ablation", temperature=0.02)
    here, there = usual.valid("ucb"), NINE.valid("ucb")
    assert all(units(usual, "ucb", seed) == units(NINE, "ucb", seed) for seed in here)
    judged = [there[seed].figure("delta_top1") for seed in here]
    means = [mean(place, "ucb", "delta_top1") for place in cells_of(ABLATIONS, "ablation")]
    assert max(means) < theirs("9", "ucb", "Δ Top-1")[0]  # nothing here brings UCB to the paper's
    (rows,) = {record.judgement.dense.rows for record in here.values() if record.judgement}
    (rows_there,) = {record.judgement.dense.rows for record in there.values() if record.judgement}
    return [
        f"{WORDS[len(here)]} seeds, {rows:,} images to judge; {n_runs('ablations')} runs",
        f"where {rows_there:,} images judge those three at {judged[0]:.4f}, {judged[1]:.4f} and {judged[2]:.4f}",
        f"the paper's {theirs('9', 'ucb', 'Δ Top-1')[0]:.4f}",
    ]


# The pages

CLAIMS: tuple[Callable[[], list[str]], ...] = (deit, deit_tests, smollm2, smollm2_tests, ablations)
# Digits that are names, or settings that a grid file states.
NAMES = (
    r"Tables? \d+((, | and )\d+)*('s)?",
    r"\bTop-[15]\b|\btop-1\b|SmolLM2-135M(-Instruct)?|WikiText-2|DeiT-Tiny/16|float32|4-bit",
    r"with the images of seed 1\b",
    r"\(120 train and 240 val images a class, stored at 224 x 224\)|rounded to 1/32 or 1/64",
    r"10% of the heads|1% of the MLP groups",
    r"greedy tries 32 candidates a step, the bandits take 64 pulls|36 \+ 35 \+ 34 \+ 33 = 138",
    r"q below 0\.05",
    r"16 pulls a step instead of 32, one batch of 2 x 128 tokens a pull instead of two of 4 x 128, drawn from 4 batches a "
    r"step, 40 batches to judge|the 48 candidates|With 48 candidates|of which 16 pulls try half",
    r"The paper's settings, 0\.02 and 64|with 8 images a batch and 0\.02 the reward is nearly 0 or 1|do not help at 0\.02",
)


def prose(page: str) -> str:
    """The page on one line, without its code, tables and links."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    return re.sub(r"\]\([^)]*\)", "]", " ".join(" ".join(lines).split()))


@pytest.mark.parametrize("claims", CLAIMS, ids=lambda claims: claims.__name__)
def test_the_page_of_results_says_what_the_stores_hold(claims: Callable[[], list[str]]) -> None:
    page = prose((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert [claim for claim in claims() if claim not in page] == []


def test_every_number_on_the_page_of_results_is_a_claim_or_a_name() -> None:
    page = prose((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    for claim in (claim for claims in CLAIMS for claim in claims()):
        page = page.replace(claim, "")
    page = re.sub("|".join(NAMES), "", page)
    assert re.findall(r"\S* ?\S*\d\S* ?\S*", page) == []


def test_the_first_table_of_the_page_of_results_is_that_of_the_stores() -> None:
    order = ("ucb", "ts", "greedy", "taylor", "magnitude", "random", "fisher", "wanda")

    def ours(place: Cell, method: str) -> str:
        spread = place.spread(method, place.metric)
        assert spread
        scale = 100 if place.task == "image" else 1
        return f"{scale * spread.mean:.2f}" + (f" ± {scale * spread.deviation:.2f}" if spread.deviation else "")

    def papers(method: str) -> str:
        row = paper_row("9", "DeiT-Tiny", label(method))
        found = spread_of(row["Δ Top-1"]) if row else None
        return f"{100 * found[0]:.2f} ± {100 * found[1]:.2f}" if found else ""

    rows = {
        "DeiT-Tiny": [ours(NINE, method) for method in order],
        "the paper's": [papers(method) for method in order],
        "SmolLM2-135M": [ours(FOUR, method) for method in order],
    }
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    section = page.split("## In short")[1].split("\n## ")[0]
    table = [[part.strip() for part in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert table[0] == ["", "UCB", "TS", "Greedy", "Taylor", "Magnitude", "Random", "Fisher", "Wanda"]
    assert {row[0]: row[1:] for row in table[2:]} == rows
