from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from secateur.errors import SelectionError
from secateur.model.losses import batch_loss, standing_in
from secateur.model.zeroing import zeroed
from secateur.units import HEAD, MLP, Unit
from secateur.workers.lanes import Lane, Lanes
from tiny import FAMILIES_TINY, GROUP, hook_count, tiny_batches

UNITS = [Unit(HEAD, 0, 1), Unit(MLP, 1, 0, GROUP)]
PATIENCE = 30  # seconds after which a run that waits for another one gives up


class Interruption(Exception):
    pass


@pytest.fixture
def threads() -> Iterator[int]:
    """Four threads for torch while a test lasts, however many processors there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def model_of(lane: Lane, item: object) -> nn.Module:
    return lane.model


def loss_of(lane: Lane, batch: dict[str, torch.Tensor]) -> float:
    return float(batch_loss(lane.model, batch))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("n_items", [0, 1, 2, 7])
def test_there_is_a_result_for_each_item_in_the_order_of_the_items(count: int, n_items: int) -> None:
    lanes = Lanes(FAMILIES_TINY["gpt2"](), count)
    items = list(range(n_items))[::-1]
    assert lanes.map(lambda lane, item: 10 * item, items, []) == [10 * item for item in items]


def test_two_runs_go_side_by_side_and_one_that_ends_first_keeps_its_place() -> None:
    second_ended = threading.Event()

    def work(lane: Lane, item: str) -> tuple[str, bool]:
        if item == "second":
            second_ended.set()
            return item, True
        return item, second_ended.wait(PATIENCE)

    lanes = Lanes(FAMILIES_TINY["gpt2"](), 2)
    assert lanes.map(work, ["first", "second"], []) == [("first", True), ("second", True)]


@pytest.mark.parametrize("name", FAMILIES_TINY)
def test_the_lanes_have_modules_of_their_own_and_the_tensors_of_the_model(name: str) -> None:
    model = FAMILIES_TINY[name]()
    meeting = threading.Barrier(2)

    def work(lane: Lane, item: int) -> nn.Module:
        meeting.wait(PATIENCE)
        return lane.model

    twins = Lanes(model, 2).map(work, [0, 1], [])
    assert twins[0] is not twins[1]

    def tensors(one: nn.Module) -> dict[str, tuple[int, int]]:
        """What each one is, and where its values are."""
        named = (*one.named_parameters(remove_duplicate=False), *one.named_buffers(remove_duplicate=False))
        return {path: (id(tensor), tensor.data_ptr()) for path, tensor in named}

    modules = [id(module) for one in (model, *twins) for module in one.modules()]
    assert len(set(modules)) == len(modules) == 3 * len(list(model.modules()))
    assert tensors(twins[0]) == tensors(twins[1]) == tensors(model) != {}


def test_the_blocks_of_a_lane_are_those_of_its_own_copy() -> None:
    def blocks_are_its_own(lane: Lane, item: int) -> bool:
        return all(lane.model.get_submodule(layer.name) is layer.block for layer in lane.layers)

    assert Lanes(FAMILIES_TINY["timm swin"](), 2).map(blocks_are_its_own, range(4), []) == [True] * 4


def test_a_weight_that_is_changed_in_place_is_changed_in_the_lanes_too() -> None:
    model = FAMILIES_TINY["gpt2"]()
    lanes, batches = Lanes(model, 2), tiny_batches(model, 3)
    before = lanes.map(loss_of, batches, [])
    with torch.no_grad():
        next(model.parameters()).mul_(2)
        after = [float(batch_loss(model, batch)) for batch in batches]
    assert lanes.map(loss_of, batches, []) == after != before


def test_a_lane_is_used_by_one_run_at_a_time_and_used_again_for_the_next_items() -> None:
    """Always two runs meet in the middle of their work: were their lanes one and the same, it would be busy."""
    lanes = Lanes(FAMILIES_TINY["gpt2"](), 2)
    meeting, lock = threading.Barrier(2), threading.Lock()
    busy: set[int] = set()

    def work(lane: Lane, item: int) -> tuple[int, bool]:
        with lock:
            was_free = id(lane.model) not in busy
            busy.add(id(lane.model))
        meeting.wait(PATIENCE)
        both = len(busy) == 2
        meeting.wait(PATIENCE)
        with lock:
            busy.discard(id(lane.model))
        return id(lane.model), was_free and both

    used = lanes.map(work, range(8), [])
    assert [alone for _, alone in used] == [True] * 8
    assert len({lane for lane, _ in used}) == 2
    assert {lane for lane, _ in lanes.map(work, range(2), [])} == {lane for lane, _ in used}


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_run_is_heard_of_and_the_lanes_go_on_working_after_it(count: int) -> None:
    model = FAMILIES_TINY["gpt2"]()
    lanes, batches = Lanes(model, count), tiny_batches(model, 6)
    whole = lanes.map(loss_of, batches, UNITS)

    def work(lane: Lane, item: int) -> int:
        if item % 2:
            raise Interruption(f"item {item}")
        return item

    for _ in range(3):  # more failures than lanes
        with pytest.raises(Interruption, match="item 1"):
            lanes.map(work, range(6), UNITS)
    assert lanes.map(loss_of, batches, UNITS) == whole
    assert [hook_count(one) for one in lanes.map(model_of, range(4), [])] == [0] * 4


def test_units_that_are_not_there_are_refused_and_the_lanes_go_on_working() -> None:
    lanes = Lanes(FAMILIES_TINY["gpt2"](), 2)
    with pytest.raises(SelectionError, match=r"head 0\.9"):
        lanes.map(model_of, range(4), [Unit(HEAD, 0, 9)])
    assert len(lanes.map(model_of, range(4), UNITS)) == 4


@pytest.mark.parametrize(("count", "n_items", "each"), [(2, 6, 2), (4, 6, 1), (4, 2, 2), (3, 5, 1), (9, 9, 1), (1, 3, 4)])
def test_runs_side_by_side_share_the_threads_and_leave_the_count_as_it_was(
    count: int, n_items: int, each: int, threads: int
) -> None:
    lanes = Lanes(FAMILIES_TINY["gpt2"](), count)
    for _ in range(2):
        assert lanes.map(lambda lane, item: torch.get_num_threads(), range(n_items), []) == [each] * n_items
        assert torch.get_num_threads() == threads
    seen: list[int] = []
    stranger = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    stranger.start()
    stranger.join()
    assert seen == [threads]


def test_a_failed_run_leaves_the_count_of_threads_as_it_was(threads: int) -> None:
    def work(lane: Lane, item: int) -> None:
        raise Interruption

    with pytest.raises(Interruption):
        Lanes(FAMILIES_TINY["gpt2"](), 2).map(work, range(4), [])
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", ["hook", "hook before", "other forward"])
def test_a_hooked_model_runs_itself_in_the_calling_thread_and_its_copies_once_it_is_not_hooked(kind: str) -> None:
    model = FAMILIES_TINY["gpt2"]()
    block = model.get_submodule("transformer.h.1")
    lanes, batches = Lanes(model, 2), tiny_batches(model, 3)
    calls: list[threading.Thread] = []

    def note(*args: object) -> None:
        calls.append(threading.current_thread())

    def own_forward(*args: object, **options: object) -> object:
        note()
        return type(block).forward(block, *args, **options)

    def where(lane: Lane, batch: dict[str, torch.Tensor]) -> tuple[float, bool, threading.Thread]:
        return loss_of(lane, batch), lane.model is model, threading.current_thread()

    here = threading.current_thread()
    dense = lanes.map(loss_of, batches, [])
    if kind == "other forward":
        with standing_in(block, own_forward):
            ran = lanes.map(where, batches, [])
    else:
        hook = block.register_forward_hook(note) if kind == "hook" else block.register_forward_pre_hook(note)
        ran = lanes.map(where, batches, [])
        hook.remove()
    assert ran == [(loss, True, here) for loss in dense]
    assert calls == [here] * 3
    assert [(own, thread is here) for _, own, thread in lanes.map(where, batches, [])] == [(False, False)] * 3
    assert len(calls) == 3


@pytest.mark.parametrize(("count", "n_items"), [(1, 5), (2, 1), (2, 0)])
def test_nothing_is_copied_for_runs_that_are_one_after_another(
    count: int, n_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES_TINY["gpt2"]()
    monkeypatch.setattr(copy, "deepcopy", lambda *args: pytest.fail("copied"))
    ran = Lanes(model, count).map(lambda lane, item: (lane.model, threading.current_thread()), range(n_items), [])
    assert ran == [(model, threading.current_thread())] * n_items


def test_the_copies_are_made_once_and_no_more_than_there_are_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY["gpt2"]()
    made: list[nn.Module] = []
    deepcopy = copy.deepcopy

    def noted(one: Any, *memo: Any) -> Any:
        twin = deepcopy(one, *memo)
        if one is model:
            made.append(twin)
        return twin

    monkeypatch.setattr(copy, "deepcopy", noted)
    lanes = Lanes(model, 3)
    assert made == []
    for _ in range(3):
        assert set(lanes.map(model_of, range(7), [])) <= set(made)
    assert len(made) == 3


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama", "swin", "timm vit"])
def test_the_work_is_done_without_the_units_and_the_model_is_left_with_them(name: str, count: int) -> None:
    model = FAMILIES_TINY[name]()
    batches = tiny_batches(model, 4)
    with torch.inference_mode():
        dense = [float(batch_loss(model, batch)) for batch in batches]
        with zeroed(model, UNITS):
            without = [float(batch_loss(model, batch)) for batch in batches]
    lanes = Lanes(model, count)
    assert lanes.map(loss_of, batches, UNITS) == without
    assert lanes.map(loss_of, batches, []) == dense
    assert min(abs(a - b) for a, b in zip(without, dense, strict=True)) > 1e-4
    assert hook_count(model) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_work_is_done_in_inference_mode_with_dropout_off_and_a_model_in_training_stays_so(count: int) -> None:
    model = FAMILIES_TINY["gpt2"]().train()

    def state(lane: Lane, item: int) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), any(module.training for module in lane.model.modules())

    assert Lanes(model, count).map(state, range(3), []) == [(True, False)] * 3
    assert all(module.training for module in model.modules())
    assert not torch.is_inference_mode_enabled()
