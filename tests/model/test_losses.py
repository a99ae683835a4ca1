from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.measure.evaluate import evaluate
from secateur.model import losses
from secateur.model.losses import IGNORED, Batch, batch_loss, output_layer, part_losses, predict, row_losses, standing_in
from tiny import CAUSAL, FAMILIES_TINY, IMAGES, MASKED, VOCABULARY, randomised, tiny_batch, tiny_batches

tf: Any = transformers
CAPPED = ["gemma2", "gemma3_text"]
WIDTH = 5  # does not divide the vocabulary
CAP = 2.0  # the tiny logits are about 5, so that this changes them

with_an_output_layer = pytest.mark.parametrize("name", [*CAUSAL, *MASKED])


class Interruption(Exception):
    pass


class Table(nn.Module):
    """A language model whose logits after token i are row i of a table, given by a real output layer."""

    def __init__(self, table: Tensor, *, bias: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.head = nn.Linear(len(table), len(table), bias)
        nn.init.eye_(self.head.weight)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        return tf.modeling_outputs.CausalLMOutput(logits=self.head(self.table[input_ids]))


class Scaled(nn.Linear):
    """Not a plain layer: its logits are not its weights' alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Memory(TorchDispatchMode):
    """The elements of the largest result of any operation, and the most bytes of results that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.most_alive = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                storage = tensor.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.most_alive = max(self.most_alive, sum(self._alive.values()))
        return result


def cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Let every piece be so many classes wide, whatever the rows."""
    monkeypatch.setattr(losses, "CPU_PIECE", 0)
    monkeypatch.setattr(losses, "LEAST_WIDTH", width)


def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "output_layer", lambda model: None)


def text_model(name: str) -> Any:
    """The tiny model of a family, its logits capped if the family can."""
    model: Any = FAMILIES_TINY[name]()
    if name in CAPPED:
        assert hasattr(model.config, "final_logit_softcapping")
        model.config.final_logit_softcapping = CAP
    return model


def own_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def text(ids: list[int], labels: list[int] | None = None) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids if labels is None else labels])}


def head_of(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


# By pieces


@with_an_output_layer
def test_the_loss_by_pieces_is_the_models_own_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(name)
    cut(monkeypatch, WIDTH)
    assert output_layer(model) is head_of(model)
    with torch.no_grad():
        for batch in tiny_batches(model, 3):
            assert (batch["labels"][:, 1:] == IGNORED).any()
            loss = batch_loss(model, batch)
            assert loss.shape == ()
            assert float(loss) == pytest.approx(float(own_loss(model, batch)), abs=1e-5)


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("cap", [CAP, 30.0, None])
def test_logits_are_capped_as_the_model_caps_them(name: str, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES_TINY[name]()
    batch = tiny_batch(model)
    cut(monkeypatch, WIDTH)
    with torch.no_grad():
        model.config.final_logit_softcapping = 1.0
        other = float(batch_loss(model, batch))
        model.config.final_logit_softcapping = cap
        expected = float(own_loss(model, batch))
        assert float(batch_loss(model, batch)) == pytest.approx(expected, abs=1e-5)
    assert abs(other - expected) > 0.1  # the cap matters


@pytest.mark.parametrize(
    ("piece", "least", "widths"),
    [
        (27 * 5, 1, [5, 5, 5, 5, 5, 5, 2]),
        (27 * 6 - 1, 1, [5, 5, 5, 5, 5, 5, 2]),
        (27 * 5, 7, [7, 7, 7, 7, 4]),
        (27 * 32, 1, [32]),
        (27 * 31, 1, [31, 1]),
        (0, 1, [1] * 32),
    ],
)
def test_the_pieces_cover_the_vocabulary_once(
    piece: int, least: int, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model("llama")
    batch = tiny_batch(model)  # 27 rows
    head, linear, seen = head_of(model), F.linear, []

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() == head.weight.untyped_storage().data_ptr():
            seen.append((weight.storage_offset() // head.in_features, len(weight)))
        return linear(x, weight, bias)

    monkeypatch.setattr(losses, "CPU_PIECE", piece)
    monkeypatch.setattr(losses, "LEAST_WIDTH", least)
    monkeypatch.setattr(F, "linear", spy)
    with torch.no_grad():
        row_losses(model, batch)
    assert seen == [(sum(widths[:i]), width) for i, width in enumerate(widths)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_the_width_of_the_pieces_changes_no_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(name)
    batch = tiny_batch(model)
    with torch.no_grad():
        expected = row_losses(model, batch).losses  # one piece
        for width in (1, 2, 5, 16, 31, 32, 1000):
            cut(monkeypatch, width)
            found = row_losses(model, batch).losses
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_rows_of_large_logits_are_summed_without_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(8, 8)
    table[3, 1], table[3, 6] = 1000, 999  # each in a piece of its own
    model = Table(table)
    for width in (8, 3):
        cut(monkeypatch, width)
        found = row_losses(model, text([3, 1, 3, 6, 0])).losses
        assert found.tolist() == pytest.approx(
            [math.log(1 + math.exp(-1)), math.log(8), math.log(1 + math.e), math.log(8)], abs=1e-4
        )


@pytest.mark.parametrize("width", [WIDTH, VOCABULARY])
def test_a_row_without_a_label_has_no_loss(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("llama")
    batch = tiny_batch(model)
    batch["labels"][2, 3:7] = IGNORED
    cut(monkeypatch, width)
    with torch.no_grad():
        found = row_losses(model, batch)
        logits, labels = predict(model, batch)
    assert torch.equal(found.labels, batch["labels"][:, 1:].flatten()) and torch.equal(found.labels, labels)
    ignored = found.labels == IGNORED
    assert int(ignored.sum()) == 5
    assert (found.losses[ignored] == 0).all()
    expected = F.cross_entropy(logits[~ignored], labels[~ignored], reduction="none")
    torch.testing.assert_close(found.losses[~ignored], expected, rtol=0, atol=1e-5)
    assert found.best is None


def test_a_row_without_a_label_has_no_loss_even_if_its_logits_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(8, 8)
    table[7] = math.nan
    cut(monkeypatch, 3)
    model = Table(table)
    found = row_losses(model, text([1, 7, 2, 3], [1, 7, IGNORED, 3])).losses.tolist()
    assert found == pytest.approx([math.log(8), 0, math.log(8)])
    assert row_losses(model, text([1, 7, 2, 3])).losses.isnan().tolist() == [False, True, False]


def test_an_output_layer_with_a_bias_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("llama")
    head: Any = nn.Linear(16, VOCABULARY)
    model.lm_head = head
    randomised(model)
    batch = tiny_batch(model)
    cut(monkeypatch, WIDTH)
    assert output_layer(model) is not None
    with torch.no_grad():
        expected = float(own_loss(model, batch))
        logits, _ = predict(model, batch)
        found = row_losses(model, batch, best=True)
        assert found.best is not None and torch.equal(found.best[:, 0], logits.argmax(-1))
        assert float(batch_loss(model, batch)) == pytest.approx(expected, abs=1e-5)
        head.bias.zero_()
        assert abs(float(own_loss(model, batch)) - expected) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_bfloat16_models_loss_is_float32_and_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(name).to(torch.bfloat16)
    batch = tiny_batch(model)
    cut(monkeypatch, WIDTH)
    with torch.no_grad():
        loss = batch_loss(model, batch)
        assert row_losses(model, batch).losses.dtype == loss.dtype == torch.float32
        assert float(loss) == pytest.approx(float(own_loss(model, batch)), abs=1e-3)  # bfloat16 has steps of 0.016 there


@with_an_output_layer
def test_gradients_by_pieces_are_those_of_the_models_own_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(name)
    batch = tiny_batch(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(own_loss(model, batch), parameters)
    cut(monkeypatch, WIDTH)
    found = torch.autograd.grad(batch_loss(model, batch), parameters)
    for parameter, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=parameter)
    assert sum(float(gradient.abs().max()) > 1e-3 for gradient in expected) > len(expected) // 2


# The highest class


@with_an_output_layer
@pytest.mark.parametrize("width", [1, WIDTH, VOCABULARY])
def test_the_best_class_of_a_row_is_the_highest_of_its_whole_logits(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = text_model(name)
    batch = tiny_batch(model)
    cut(monkeypatch, width)
    with torch.no_grad():
        logits, _ = predict(model, batch)
        found = row_losses(model, batch, best=True)
    counted = found.labels != IGNORED if name in MASKED else torch.ones_like(found.labels, dtype=torch.bool)
    assert found.best is not None and torch.equal(found.best[counted], logits[counted].argmax(-1, keepdim=True))
    assert len(set((found.best[counted] // WIDTH).flatten().tolist())) > 1  # in more than one piece
    assert (found.best[~counted] == -1).all()  # the logits of tokens that are not masked are not computed


def test_the_best_classes_of_an_image_are_its_five_highest() -> None:
    model = FAMILIES_TINY["vit"]()
    batch = tiny_batch(model)
    with torch.no_grad():
        logits, _ = predict(model, batch)
        found = row_losses(model, batch, best=True)
        assert row_losses(model, batch).best is None
    assert found.best is not None and torch.equal(found.best, logits.argsort(-1, descending=True)[:, :5])


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_the_first_of_two_equally_high_classes_is_the_best(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(8, 8)
    table[1, [2, 6]] = 4.0
    table[2, [6, 7]] = 4.0
    table[3] = -4.0
    cut(monkeypatch, width)
    best = row_losses(Table(table), text([1, 2, 3, 4, 0]), best=True).best
    assert best is not None and best[:, 0].tolist() == [2, 6, 0, 0]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_row_of_nan_logits_is_never_right(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.eye(8)
    table[7] = math.nan
    cut(monkeypatch, width)
    best = row_losses(Table(table), text([7, *range(8)]), best=True).best
    assert best is not None and best[1:, 0].tolist() == list(range(7))
    assert int(best[0]) not in range(8) and int(best[0]) != IGNORED


@pytest.mark.parametrize("label", [32, 40, -1])
def test_a_label_that_is_no_class_makes_the_loss_nan_instead_of_a_plausible_number(label: int) -> None:
    model = FAMILIES_TINY["llama"]()
    batch = tiny_batch(model)
    batch["labels"][0, 3] = label
    losses = row_losses(model, batch).losses
    assert losses.isnan().nonzero().flatten().tolist() == [2]  # the token at 3 is predicted at 2


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("broken", [0, 4, 7])
def test_a_row_with_a_nan_among_its_logits_is_never_right(broken: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Table(torch.eye(8), bias=True)
    model.head.bias.data.zero_()[broken] = math.nan
    cut(monkeypatch, width)
    found = row_losses(model, text(list(range(8))), best=True)
    assert found.losses.isnan().all()
    assert found.best is not None and not set(found.best.flatten().tolist()) & (set(range(8)) - {broken})


def test_a_row_of_nan_logits_is_never_right_when_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    uncut(monkeypatch)
    best = row_losses(Table(torch.full((8, 8), math.nan)), text([3, 0]), best=True).best
    assert best is not None and int(best) not in range(8)


def test_an_image_of_nan_logits_is_never_right() -> None:
    model: Any = FAMILIES_TINY["vit"]()
    model.classifier.bias.data[:] = math.nan
    batch = tiny_batch(model)
    with torch.no_grad():
        best = row_losses(model, batch, best=True).best
    assert best is not None and not (best == batch["labels"][:, None]).any()


# Parts


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", *IMAGES])
def test_each_part_of_a_batch_has_the_loss_it_has_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES_TINY[name]() if name in IMAGES else text_model(name)
    batches = tiny_batches(model, 4)
    if name in CAUSAL:  # parts that predict 26, 2, 4 and 26 tokens
        batches[1]["labels"][:, 1:] = IGNORED
        batches[1]["labels"][1, 4:6] = 7
        batches[2]["labels"][:2, 2:] = IGNORED
        batches[2]["labels"][2, 4:] = IGNORED
        assert [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches] == [26, 2, 4, 26]
    together = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    cut(monkeypatch, WIDTH)
    with torch.no_grad():
        alone = torch.stack([batch_loss(model, batch) for batch in batches])
        found = part_losses(model, together, 4)
        assert part_losses(model, together, 1).shape == (1,)
    assert found.shape == (4,)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
    assert len({round(loss, 3) for loss in alone.tolist()}) == 4  # so that another order would be seen


def test_the_loss_of_a_batch_of_images_is_the_mean_cross_entropy() -> None:
    for name in IMAGES:
        model = FAMILIES_TINY[name]()
        batch = tiny_batch(model)
        with torch.no_grad():
            expected = F.cross_entropy(*predict(model, batch))
            assert float(batch_loss(model, batch)) == pytest.approx(float(expected), abs=1e-6)


def test_a_part_that_predicts_nothing_is_nan_and_spoils_no_other() -> None:
    model = text_model("llama")
    one, two, three = tiny_batches(model, 3)
    two["labels"][:, 1:] = IGNORED
    together = {key: torch.cat([batch[key] for batch in (one, two, three)]) for key in one}
    with torch.no_grad():
        found = part_losses(model, together, 3).tolist()
        assert math.isnan(found[1]) and math.isnan(own_loss(model, two))
        assert found[::2] == pytest.approx([float(own_loss(model, batch)) for batch in (one, three)], abs=1e-5)


# Memory


def wide_model() -> tuple[nn.Module, dict[str, Tensor]]:
    """A vocabulary that dwarfs everything else, and texts of 1,008 rows: 4 million logits."""
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    model = randomised(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=4096, max_position_embeddings=64, **shape)))
    ids = torch.randint(0, 4096, (16, 64), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids}


def _batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        batch_loss(model, batch)


def _evaluate(model: nn.Module, batch: dict[str, Tensor]) -> None:
    evaluate(model, [batch])


def _last_words(model: nn.Module, batch: dict[str, Tensor]) -> None:
    last = torch.zeros_like(batch["labels"], dtype=torch.bool)
    last[:, -2:] = True
    assert evaluate(model, [batch | {"last_word": last}]).last_word_accuracy is not None


@pytest.mark.parametrize("run", [_batch_loss, _evaluate, _last_words])
def test_the_logits_are_never_held_whole(
    run: Callable[[nn.Module, dict[str, Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = wide_model()
    rows, piece = 16 * 63, 16 * 63 * 260  # 260 is 2**18 // 1008
    with Memory() as by_pieces:
        run(model, batch)
    assert by_pieces.largest == piece <= losses.CPU_PIECE
    assert 4 * piece <= by_pieces.most_alive < 4 * 4 * piece  # bytes
    uncut(monkeypatch)
    with Memory() as whole:  # what the counter says when they are
        run(model, batch)
    assert whole.largest >= rows * 4096 and whole.most_alive >= 4 * rows * 4096


# When the output layer cannot be cut


def _hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)


def _pre_hooked(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def _subclassed(model: Any) -> None:
    weight = model.lm_head.weight
    model.lm_head = Scaled(16, VOCABULARY, bias=False)
    model.lm_head.weight = weight


def _parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Halved())


def _offloaded(model: Any) -> None:
    """As a device map leaves it: no weights, and a forward that fetches them."""
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(weight.to("meta"))
    model.lm_head.forward = lambda x: F.linear(x, weight)


def _without_one(model: Any) -> None:
    model.get_output_embeddings = lambda: None


SPECIAL = [_hooked, _pre_hooked, _subclassed, _parametrized, _offloaded, _without_one]


@pytest.mark.parametrize("change", SPECIAL)
def test_an_output_layer_that_is_not_plain_is_run_whole(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("llama")
    batch = tiny_batch(model)
    cut(monkeypatch, WIDTH)
    with torch.no_grad():
        plain = float(own_loss(model, batch))
        change(model)
        expected, (logits, _) = float(own_loss(model, batch)), predict(model, batch)
        assert output_layer(model) is None
        assert float(batch_loss(model, batch)) == pytest.approx(expected, abs=1e-5)
        found = row_losses(model, batch, best=True)
    assert found.losses[9] == 0  # the first label of the second text is left out
    assert found.best is not None and torch.equal(found.best, logits.argmax(-1, keepdim=True))
    if change not in (_offloaded, _without_one):
        assert abs(plain - expected) > 1e-2  # to pass over the change would be seen


def test_a_model_that_has_no_word_for_its_output_layer_is_run_whole() -> None:
    model: Any = nn.Module()
    model.table = nn.Parameter(torch.eye(8))
    model.forward = lambda input_ids, use_cache: tf.modeling_outputs.CausalLMOutput(logits=model.table[input_ids])
    assert output_layer(model) is None
    assert row_losses(model, text([1, 1, 2])).losses.tolist() == pytest.approx([math.log(math.e + 7) - 1, math.log(math.e + 7)])


def test_a_forward_of_the_output_layers_own_is_back_after_a_loss() -> None:
    """A device map puts one there, which moves the input to where the weights are."""
    model = text_model("llama")
    batch = tiny_batch(model)
    head: Any = head_of(model)
    before = model(**batch).logits
    own = head.forward = head.forward  # in the layer's own __dict__ from now on
    with torch.no_grad():
        batch_loss(model, batch)
    assert head.__dict__["forward"] is own
    assert torch.equal(model(**batch).logits, before)


def test_a_model_that_fails_keeps_its_output_layer() -> None:
    model = text_model("llama")
    batch = tiny_batch(model)

    def fail(*args: Any) -> None:
        raise Interruption

    with torch.no_grad():
        before = model(**batch).logits
        for module in (model.model.norm, model):  # before the output layer, and after it
            handle = module.register_forward_hook(fail)
            with pytest.raises(Interruption):
                batch_loss(model, batch)
            handle.remove()
            assert "forward" not in head_of(model).__dict__
            assert torch.equal(model(**batch).logits, before)


# Standing in


def _negative(x: Tensor) -> Tensor:
    return -x


def _twice(x: Tensor) -> Tensor:
    return 2 * x


ONE = torch.ones(1)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("own", [None, _twice])
def test_standing_in_ends_with_the_block(own: Callable[[Tensor], Tensor] | None, fails: bool) -> None:
    module: Any = nn.Identity()
    if own is not None:
        module.forward = own
    usual = 1.0 if own is None else 2.0
    assert module(ONE) == usual
    try:
        with standing_in(module, _negative):
            assert module(ONE) == -1
            if fails:
                raise Interruption
    except Interruption:
        assert fails
    assert module(ONE) == usual
    assert module.__dict__.get("forward") is own


def test_standing_in_can_be_nested() -> None:
    module = nn.Identity()
    with standing_in(module, _negative):
        with standing_in(module, _twice):
            assert module(ONE) == 2
        assert module(ONE) == -1
    assert module(ONE) == 1 and "forward" not in module.__dict__
