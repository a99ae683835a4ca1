from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from secateur.errors import SettingError
from secateur.measure import flops, speed
from secateur.measure.speed import Measurement, Median, Timing, image_shape, measure, median
from tiny import FAMILIES_TINY, IMAGE, VOCABULARY, hook_count, randomised

TOKENS, NEW = 12, 4  # the tiny text models have room for 16


def changed(name: str, **fields: Any) -> nn.Module:
    """The tiny transformers model of a family with other fields in its config."""
    model: Any = FAMILIES_TINY[name]()
    for field, value in fields.items():
        setattr(model.config, field, value)
    return randomised(type(model)(model.config))


def quick(dense: nn.Module, small: nn.Module, **options: Any) -> Measurement:
    usual: dict[str, Any] = {"batch_sizes": (2,), "tokens": TOKENS, "new_tokens": NEW, "repeats": 3}
    return measure(dense, small, **usual | options)


# FLOPs


@pytest.mark.parametrize("bias", [False, True])
def test_the_flops_of_a_linear_layer_are_two_a_weight_and_row(bias: bool) -> None:
    layer, x = nn.Linear(5, 7, bias=bias), torch.ones(3, 5)
    assert flops.count(lambda: layer(x)) == 2 * 3 * 5 * 7
    with torch.inference_mode():
        assert flops.count(lambda: (layer(x), layer(x))) == 2 * 2 * 3 * 5 * 7


def test_the_flops_of_attention_are_those_of_its_two_products() -> None:
    query, key, value = (torch.ones(2, 3, length, 8) for length in (4, 6, 6))
    attend = nn.functional.scaled_dot_product_attention
    assert flops.count(lambda: attend(query, key, value)) == 2 * (2 * 2 * 3 * 4 * 6 * 8)


# By hand: the tiny Llama has a width of 16, 4 heads of 4 over 2 K/V heads, an MLP of 14, 32 tokens and 3 blocks.
LINEAR = 2 * (16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 14)  # in a block, for a token
KEY = 2 * 2 * 4 * 4  # attention of a token to one key, in a block
LOGITS = 2 * 16 * VOCABULARY


def test_the_flops_of_prefill_and_decode_are_those_of_a_call() -> None:
    model = FAMILIES_TINY["llama"]()
    prefill, decode = quick(model, model).timings
    assert prefill.dense_flops == 2 * (TOKENS * 3 * (LINEAR + KEY * TOKENS) + LOGITS)
    keys = sum(range(TOKENS + 1, TOKENS + NEW + 1)) / NEW  # on average over the new tokens, each of which sees itself
    assert decode.dense_flops == 2 * (3 * (LINEAR + KEY * keys) + LOGITS)


@pytest.mark.parametrize(
    ("name", "field", "matrices", "width"),
    [("llama", "intermediate_size", 3, 16), ("gpt2", "n_inner", 2, 12), ("gemma2", "intermediate_size", 3, 12)],
)
def test_four_mlp_channels_fewer_are_that_many_flops_fewer(name: str, field: str, matrices: int, width: int) -> None:
    measured = quick(FAMILIES_TINY[name](), changed(name, **{field: 10}), batch_sizes=(1, 3))
    saved = 3 * matrices * 2 * width * 4  # for a token
    assert [(timing.name, timing.batch_size, timing.dense_flops - timing.small_flops) for timing in measured.timings] == [
        ("prefill", 1, saved * TOKENS),
        ("decode", 1, saved),
        ("prefill", 3, 3 * saved * TOKENS),
        ("decode", 3, 3 * saved),
    ]
    biases = 3 * 4 if name == "gpt2" else 0
    assert measured.dense_params - measured.small_params == 3 * matrices * width * 4 + biases


@pytest.mark.parametrize(
    ("name", "field", "matrices"),
    [
        ("bert", "intermediate_size", 2),
        ("bert classes", "intermediate_size", 2),
        ("bert embeddings", "intermediate_size", 2),
        ("distilbert", "hidden_dim", 2),
        ("modernbert", "intermediate_size", 3),
    ],
)
def test_an_encoder_of_texts_has_one_workload_a_call_on_whole_texts(name: str, field: str, matrices: int) -> None:
    measured = quick(FAMILIES_TINY[name](), changed(name, **{field: 10}), batch_sizes=(1, 3))
    saved = 3 * matrices * 2 * 12 * 4 * TOKENS
    assert [(timing.name, timing.batch_size, timing.dense_flops - timing.small_flops) for timing in measured.timings] == [
        ("encode", 1, saved),
        ("encode", 3, 3 * saved),
    ]


def test_a_tower_has_the_workload_of_images() -> None:
    clip = quick(FAMILIES_TINY["clip_vision_model"](), changed("clip_vision_model", intermediate_size=10))
    saved = [(timing.name, timing.dense_flops - timing.small_flops) for timing in clip.timings]
    assert saved == [("forward", 2 * 3 * 2 * 2 * 5 * 12 * 4)]  # 2 images, 3 blocks, 2 matrices, 4 patches and a class token


def test_a_narrower_mlp_is_fewer_flops_of_an_image_model() -> None:
    vit = quick(FAMILIES_TINY["vit"](), changed("vit", intermediate_size=10))
    swin = quick(FAMILIES_TINY["swin"](), changed("swin", mlp_ratio=1.0))
    timm_vit: Any = FAMILIES_TINY["timm vit"]
    narrow = timm_vit()
    for block in narrow.blocks:
        block.mlp.fc1, block.mlp.fc2 = nn.Linear(12, 11), nn.Linear(11, 12)
    timm = quick(timm_vit(), narrow)
    saved = [timing.dense_flops - timing.small_flops for found in (vit, swin, timm) for timing in found.timings]
    assert saved == [
        2 * 3 * 2 * 2 * 5 * 12 * 4,  # 2 images, 3 blocks, 2 matrices, 4 patches and a class token
        2 * 2 * 2 * 2 * (64 * 12 * 3 + 16 * 24 * 6),  # 2 blocks of 64 patches, 2 of 16
        2 * 3 * 2 * 2 * 5 * 12 * 4,
    ]


def without_logits_to_keep(model: Any) -> nn.Module:
    class Plain(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
            return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    model.__class__ = Plain
    return model  # type: ignore[no-any-return]


def test_a_model_that_cannot_give_its_last_logits_alone_has_both_give_them_all() -> None:
    takes = FAMILIES_TINY["llama"]()
    plain = without_logits_to_keep(FAMILIES_TINY["llama"]())
    usual, mixed = (quick(takes, small).timings[0] for small in (takes, plain))
    assert (mixed.dense_flops, mixed.small_flops) == (usual.dense_flops + 2 * (TOKENS - 1) * LOGITS,) * 2


# The clock


class Call(NamedTuple):
    """One call of a model, as a hook sees it."""

    who: str
    timed: bool
    shape: tuple[int, ...]
    cached: int  # tokens of which keys and values are at hand
    caches: bool | None  # whether it was told to keep them
    input: torch.Tensor
    threads: int
    training: bool
    inference: bool


class Watch:
    """A clock that moves when the models it watches are called, by a step of each model's own."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.reads = 0
        self.calls: list[Call] = []

    def perf_counter(self) -> float:
        self.reads += 1
        return self.now

    def watch(self, who: str, model: nn.Module) -> nn.Module:
        def hook(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
            self.now += self.seconds[who]
            tensor = next(one for one in (*args, given.get("input_ids"), given.get("pixel_values")) if one is not None)
            cache = given.get("past_key_values")
            self.calls.append(
                Call(
                    who,
                    timed=self.reads % 2 == 1,  # read once before a run, and once after
                    shape=tuple(tensor.shape),
                    cached=cache.get_seq_length() if cache is not None else 0,
                    caches=given.get("use_cache"),
                    input=tensor,
                    threads=torch.get_num_threads(),
                    training=any(part.training for part in module.modules()),
                    inference=torch.is_inference_mode_enabled(),
                )
            )

        model.register_forward_pre_hook(hook, with_kwargs=True)
        return model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch(dense=0.003, small=0.002)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=watch.perf_counter))
    return watch


def watched(clock: Watch, name: str, **fields: Any) -> tuple[nn.Module, nn.Module]:
    return clock.watch("dense", FAMILIES_TINY[name]()), clock.watch("small", changed(name, **fields))


def test_the_models_take_turns_and_who_is_first_alternates(clock: Watch) -> None:
    quick(*watched(clock, "vit"), repeats=4)
    assert [call.who for call in clock.calls if call.timed] == ["dense", "small", "small", "dense"] * 2
    warm = list(itertools.takewhile(lambda call: not call.timed, clock.calls))
    assert sorted(call.who for call in warm) == ["dense", "dense", "small", "small"]  # to count the FLOPs, and to warm up


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_time_of_a_text_model_is_that_of_a_call(name: str, clock: Watch) -> None:
    measured = quick(*watched(clock, name), batch_sizes=(2, 1), repeats=5)
    assert [(timing.name, timing.batch_size) for timing in measured.timings] == [
        ("prefill", 2),
        ("decode", 2),
        ("prefill", 1),
        ("decode", 1),
    ]
    for timing in measured.timings:
        assert timing.dense_ms == pytest.approx((3,) * 5)
        assert timing.small_ms == pytest.approx((2,) * 5)
    assert clock.reads == 2 * 2 * 5 * 4  # around each run alone


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_decoding_is_timed_token_by_token_after_a_prompt_outside_of_the_clock(name: str, clock: Watch) -> None:
    quick(*watched(clock, name))
    timed = {
        who: [(*call.shape, call.cached) for call in clock.calls if call.timed and call.who == who] for who in clock.seconds
    }
    run = [(2, 1, TOKENS + i) for i in range(NEW)]  # every run starts with the cache of the prompt alone
    assert timed["dense"] == timed["small"] == [(2, TOKENS, 0)] * 3 + run * 3
    assert {(call.shape[1], call.caches) for call in clock.calls if call.timed} == {(TOKENS, False), (1, True)}
    prompts = [call for call in clock.calls if not call.timed and call.shape == (2, TOKENS)]
    assert len(prompts) == 2 * (2 + 1)  # FLOPs and warm-up of prefill, and the one that fills the cache of all the runs


@pytest.mark.parametrize("name", ["vit", "swin", "timm vit", "timm swin"])
def test_the_time_of_an_image_model_is_that_of_a_batch(name: str, clock: Watch) -> None:
    models = [clock.watch(who, FAMILIES_TINY[name]()) for who in ("dense", "small")]
    (timing,) = quick(*models, batch_sizes=(4,)).timings
    assert (timing.name, timing.batch_size) == ("forward", 4)
    assert timing.dense_images_per_second == pytest.approx(4 / 0.003)
    assert timing.small_images_per_second == pytest.approx(4 / 0.002)
    assert {call.shape for call in clock.calls} == {(4, 3, IMAGE, IMAGE)}
    assert image_shape(models[0]) == (3, IMAGE, IMAGE)


def test_an_image_need_not_be_square() -> None:
    model: Any = FAMILIES_TINY["vit"]()
    model.config.image_size = [8, 16]
    assert image_shape(model) == (3, 8, 16)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_both_models_get_the_same_input_and_all_get_it_again(name: str, clock: Watch) -> None:
    def inputs(who: str) -> list[torch.Tensor]:
        return [call.input for call in clock.calls if call.who == who and call.timed]

    dense, small = watched(clock, name)
    quick(dense, small)
    first = inputs("dense"), sorted(inputs("small"), key=lambda x: x.numel(), reverse=True)
    assert all(
        torch.equal(a, b) for a, b in zip(sorted(first[0], key=lambda x: x.numel(), reverse=True), first[1], strict=True)
    )
    assert len(first[0][0].unique()) > 5
    clock.calls.clear()
    quick(dense, small)
    assert all(torch.equal(a, b) for a, b in zip(first[0], inputs("dense"), strict=True))


@pytest.mark.parametrize("swapped", [False, True])
def test_the_tokens_and_the_places_are_those_that_both_models_have(swapped: bool, clock: Watch) -> None:
    models = watched(clock, "llama", vocab_size=20, max_position_embeddings=10)
    measured = quick(*(reversed(models) if swapped else models), tokens=128)
    assert (measured.tokens, measured.new_tokens) == (6, 4)
    assert {call.shape for call in clock.calls} == {(2, 6), (2, 1)}
    assert max(int(call.input.max()) for call in clock.calls) == 19


def test_nothing_but_the_models_room_makes_a_prompt_shorter(clock: Watch) -> None:
    models: Any = watched(clock, "llama")
    models[0].config.max_position_embeddings = 64
    models[1].config.__dict__["max_position_embeddings"] = None  # says nothing; the config's own check would not let it
    assert quick(*models, tokens=60).tokens == 60
    assert quick(*models, tokens=61).tokens == 60


def test_the_models_are_called_as_for_use_and_left_as_they_were(clock: Watch) -> None:
    dense, small = watched(clock, "gpt2")
    dense.train()
    dense.get_submodule("transformer.h.1").eval()
    modes = [module.training for module in dense.modules()]
    hooks = hook_count(dense)
    quick(dense, small)
    assert {(call.training, call.inference) for call in clock.calls} == {(False, True)}
    assert [module.training for module in dense.modules()] == modes
    assert hook_count(dense) == hooks


@pytest.fixture
def threads() -> Iterator[Callable[[], int]]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "used"), [(None, 2), (1, 1), (3, 3)])
def test_the_threads_are_set_for_the_measurement_and_put_back(
    asked: int | None, used: int, clock: Watch, threads: Callable[[], int]
) -> None:
    measured = quick(*watched(clock, "vit"), threads=asked)
    assert measured.threads == used
    assert {call.threads for call in clock.calls} == {used}
    assert threads() == 2


def test_the_threads_are_put_back_after_an_error_too(threads: Callable[[], int]) -> None:
    def stop(*made: int) -> None:
        assert threads() == 1
        raise KeyboardInterrupt

    model = FAMILIES_TINY["vit"]().train()
    with pytest.raises(KeyboardInterrupt):
        quick(model, model, threads=1, progress=stop)
    assert threads() == 2
    assert model.training and not torch.is_inference_mode_enabled()


def test_the_progress_counts_the_repetitions_of_all_workloads() -> None:
    told: list[tuple[int, int]] = []
    model = FAMILIES_TINY["llama"]()
    quick(model, model, batch_sizes=(1, 2), progress=lambda *made: told.append(made))
    assert told == [(i + 1, 12) for i in range(12)]


@pytest.mark.parametrize(("device", "waits"), [("cpu", False), ("meta", True)])
def test_the_clock_waits_for_a_device_that_works_on_its_own(device: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    times = itertools.count(1.0, 0.5)

    def perf_counter() -> float:
        happened.append("read")
        return next(times)

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda where: happened.append(f"wait for {where}"))
    model = FAMILIES_TINY["vit"]().to(device)
    model.register_forward_pre_hook(lambda *_: happened.append("run"))
    (timing,) = quick(model, model).timings
    assert {*timing.dense_ms, *timing.small_ms} == {500}
    wait = [f"wait for {device}"] * waits
    counted_and_warmed_up = ["run"] * 4
    assert happened == counted_and_warmed_up + [*wait, "read", "run", *wait, "read"] * 6


# What is counted and recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parameters_are_counted_once_and_weighed_in_their_dtype(dtype: torch.dtype) -> None:
    dense, small = (changed("gpt2", n_inner=width).to(dtype) for width in (14, 10))
    measured = quick(dense, small)
    separate = VOCABULARY * 12 + 16 * 12 + 2 * 12  # tokens, whose matrix gives the logits too, places, the last norm
    block = (12 * 36 + 36) + (12 * 12 + 12) + 4 * 12
    expected = [separate + 3 * (block + 2 * 12 * width + width + 12) for width in (14, 10)]
    assert [measured.dense_params, measured.small_params] == expected
    assert [measured.dense_bytes, measured.small_bytes] == [n * dtype.itemsize for n in expected]
    assert (measured.device, measured.dtype) == ("cpu", str(dtype).removeprefix("torch."))
    assert measured.torch_version == torch.__version__


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "vit", "timm vit", "swin"])
def test_a_measurement_is_plain_data_with_all_that_was_measured_and_derived(name: str) -> None:
    measured = quick(FAMILIES_TINY[name](), FAMILIES_TINY[name]())
    measured = replace(measured, dense_disk=4, small_memory=5)
    fields = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    assert fields["dense_params"] == measured.dense_params
    assert (fields["dense_disk"], fields["small_disk"], fields["dense_memory"], fields["small_memory"]) == (4, None, None, 5)
    assert fields["tokens"] == (None if measured.timings[0].name == "forward" else TOKENS)
    assert fields["verdicts"] == measured.verdicts()
    assert fields.keys() == {*Measurement.__dataclass_fields__, "verdicts"}
    for found, timing in zip(fields["timings"], measured.timings, strict=True):
        assert min(found["dense_ms"] + found["small_ms"]) > 0
        assert found["dense_ms"] == list(timing.dense_ms)
        assert found["speedup"] == timing.speedup._asdict()
        assert found["small_median"] == timing.small_median._asdict()
        assert (found["flop_ratio"], found["gain_share"]) == (1, None)
        assert found["dense_images_per_second"] == timing.dense_images_per_second


# Statistics


@pytest.mark.parametrize("n", range(1, 60))
def test_the_interval_of_a_median_is_the_narrowest_that_holds_it_in_95_of_100_samples(n: int) -> None:
    value, low, high = median([float(i) for i in reversed(range(n))])

    def holds(left_out: int) -> Fraction:
        """How often at least one more than `left_out` of n fair coins fall on either side."""
        return Fraction(sum(math.comb(n, heads) for heads in range(left_out + 1, n - left_out)), 2**n)

    assert value == (n - 1) / 2
    assert low + high == n - 1
    if n < 6:
        assert low == 0 and holds(0) < Fraction(95, 100)
    else:
        assert holds(int(low)) >= Fraction(95, 100) > holds(int(low) + 1)


def test_the_interval_of_nine_values_leaves_out_the_least_and_the_largest() -> None:
    assert median([9, 100, 5, 2, 6, 7, 8, 3, 4]) == Median(6, 3, 9)


TIMING = Timing("prefill", 1, (10.0, 2.0, 30.0), (8.0, 4.0, 10.0), dense_flops=100, small_flops=60)


def test_the_speedup_is_the_median_of_the_ratios_of_each_repetition() -> None:
    assert TIMING.dense_median == Median(10, 2, 30)
    assert TIMING.small_median == Median(8, 4, 10)
    assert TIMING.speedup == Median(1.25, 0.5, 3)
    assert replace(TIMING, small_ms=(2.0, 10.0, 4.0)).speedup == Median(5, 0.2, 7.5)  # though the ratio of the medians is 2.5


def test_the_share_of_the_gain_sets_the_time_saved_against_the_flops_saved() -> None:
    assert TIMING.flop_ratio == 100 / 60
    assert TIMING.gain_share == pytest.approx(0.2 / 0.4)
    assert replace(TIMING, small_flops=100).gain_share is None
    assert replace(TIMING, small_flops=120).gain_share is None
    assert replace(TIMING, small_ms=TIMING.dense_ms).gain_share == 0


def test_images_a_second_are_those_of_the_median_and_of_image_models_alone() -> None:
    forward = replace(TIMING, name="forward", batch_size=4)
    assert (forward.dense_images_per_second, forward.small_images_per_second) == (400, 500)
    assert (TIMING.dense_images_per_second, TIMING.small_images_per_second) == (None, None)


def timing_of(ratios: tuple[float, ...], **fields: Any) -> Timing:
    return replace(TIMING, dense_ms=ratios, small_ms=(1.0,) * len(ratios), **fields)


FASTER = timing_of((1.2, 1.1, 1.05))
UNSURE = timing_of((0.96, 0.99, 1.03), name="decode", dense_flops=1000, small_flops=909)
SLOWER = timing_of((0.5, 0.6, 0.7), name="forward", batch_size=8, small_flops=100)
EQUAL = timing_of((1.0, 1.25, 1.5))


def test_a_verdict_is_a_sentence_on_each_workload_that_is_not_faster_for_sure() -> None:
    model = FAMILIES_TINY["vit"]()
    measured = replace(quick(model, model), timings=(FASTER, UNSURE, SLOWER, EQUAL))
    unsure, slower, equal = measured.verdicts()
    for verdict, words in (
        (unsure, ["Decoding", "batch 1", "not faster", "0.99", "0.96", "1.03", "9.1%"]),
        (slower, ["forward", "batch 8", "slower", "0.60", "0.50", "0.70", "none"]),
        (equal, ["Prefill", "batch 1", "not faster", "1.25", "1.00", "1.50", "40.0%"]),
    ):
        assert all(word in verdict for word in words), verdict
    assert "slower" not in unsure + equal
    assert measured.to_json()["verdicts"] == measured.verdicts()


# What cannot be measured


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeats": 2}, "repeats.* 2.* 3"),
        ({"tokens": 0}, "tokens.* 0.* 1"),
        ({"new_tokens": 0}, "new tokens.* 0.* 1"),
        ({"batch_sizes": (1, 0)}, "batch size.* 0.* 1"),
        ({"batch_sizes": ()}, "no batch size"),
        ({"threads": 0}, "threads.* 0.* 1"),
        ({"new_tokens": 16}, "new tokens.* 16.* 16"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options: dict[str, Any], says: str, clock: Watch) -> None:
    with pytest.raises(SettingError, match=says):
        quick(*watched(clock, "llama"), **options)
    assert not clock.calls


def test_models_that_cannot_be_compared_are_refused() -> None:
    llama, vit = FAMILIES_TINY["llama"](), FAMILIES_TINY["vit"]()
    with pytest.raises(SettingError, match=r"task.*text \(dense\).*image \(small\)"):
        measure(llama, vit)
    with pytest.raises(SettingError, match=r"dtype.*bfloat16 \(dense\).*float32"):
        measure(FAMILIES_TINY["llama"]().bfloat16(), llama)
    with pytest.raises(SettingError, match=r"device.*cpu \(dense\).*meta"):
        measure(llama, FAMILIES_TINY["llama"]().to("meta"))
    with pytest.raises(SettingError, match=r"images.*16, 16.*\(dense\).*24, 24"):
        measure(vit, changed("vit", image_size=24))
