from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers.mlp import GluMlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from secateur.errors import SelectionError, UnsupportedModel
from secateur.model.families import FAMILIES, Family, anatomy, candidate_units, family_of, layer_of, task_of
from secateur.model.zeroing import zeroed
from secateur.search.damage import DamageMeter
from secateur.units import HEAD, KV_GROUP, MLP, Unit
from tiny import (
    CAUSAL,
    FAMILIES_TINY,
    GROUP,
    IMAGES,
    MASKED,
    TEXT_CLASSES,
    TEXT_EMBEDDINGS,
    TOWERS,
    logits_of,
    tf,
    tiny_batch,
)

THREE = ("0", "1", "2")
STAGES = ("0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1")


@dataclass(frozen=True)
class ByHand:
    """What a person reads off a tiny model's config and its printed modules; `{}` stands for a block."""

    out: str
    mlp_out: str
    heads: tuple[int, ...] = (3, 3, 3)
    head_dim: int = 4
    mlp_widths: tuple[int, ...] = (14, 14, 14)
    blocks: tuple[str, ...] = THREE
    shared_kv: bool = False
    per_kv: int = 1  # heads that look at the same K/V head
    heads_from: tuple[str, ...] = ()  # the projections that make the heads, where they do not lie beside `out`
    mlp_from: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()  # the blocks whose MLPs are experts, side by side in `experts.down_proj`

    def columns(self, unit: Unit) -> list[int]:
        """The input channels of the output projection that carry the unit."""
        if unit.kind == HEAD:
            return [unit.index * self.head_dim + i for i in range(self.head_dim)]
        if unit.kind == KV_GROUP:
            size = self.per_kv * self.head_dim
            return [unit.index * size + i for i in range(size)]
        return [c for c in range(self.mlp_widths[unit.layer]) if c // GROUP == unit.index]

    def projection(self, model: nn.Module, unit: Unit) -> nn.Module:
        path = self.mlp_out if unit.kind == MLP else self.out
        if unit.kind == MLP and unit.layer in self.experts:
            path = path.replace("down_proj", "experts")
        return model.get_submodule(path.format(self.blocks[unit.layer]))


def _llama(heads: int = 4, head_dim: int = 4, per_kv: int = 2, experts: tuple[int, ...] = ()) -> ByHand:
    return ByHand(
        "model.layers.{}.self_attn.o_proj",
        "model.layers.{}.mlp.down_proj",
        heads=(heads,) * 3,
        head_dim=head_dim,
        shared_kv=per_kv > 1,
        per_kv=per_kv,
        mlp_widths=tuple(16 if layer in experts else 14 for layer in range(3)),
        experts=experts,
    )


_OPT = ByHand("model.decoder.layers.{}.self_attn.out_proj", "model.decoder.layers.{}.fc2")
_NEOX = ByHand("gpt_neox.layers.{}.attention.dense", "gpt_neox.layers.{}.mlp.dense_4h_to_h", head_dim=8)
_DEIT = ByHand("deit.layers.{}.attention.o_proj", "deit.layers.{}.mlp.fc2")
_TIMM_VIT = ByHand("blocks.{}.attn.proj", "blocks.{}.mlp.fc2", mlp_widths=(15, 15, 15))


def _bert(inner: str) -> ByHand:
    block = f"{inner}encoder.layer.{{}}"
    return ByHand(
        f"{block}.attention.output.dense",
        f"{block}.output.dense",
        heads_from=tuple(f"{block}.attention.self.{name}" for name in ("query", "key", "value")),
        mlp_from=(f"{block}.intermediate.dense",),
    )


_CLIP = ByHand("encoder.layers.{}.self_attn.out_proj", "encoder.layers.{}.mlp.fc2")
_DISTILBERT = "distilbert.transformer.layer.{}"

BY_HAND: dict[str, ByHand] = {
    "gpt2": ByHand("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
    "opt": _OPT,
    "opt post-norm": _OPT,
    "gpt_neox": _NEOX,
    "gpt_neox sequential": _NEOX,
    "llama": _llama(),
    "llama mha": _llama(per_kv=1),
    "mistral": _llama(),
    "smollm3": _llama(),
    "qwen2": _llama(heads=6, per_kv=3),
    "qwen3": _llama(head_dim=8),
    "gemma": _llama(heads=3, head_dim=8, per_kv=3),
    "gemma2": _llama(head_dim=8),
    "gemma3_text": _llama(head_dim=8),
    "mixtral": _llama(experts=(0, 1, 2)),
    "qwen2_moe": _llama(experts=(0, 1)),
    "qwen3_moe": _llama(head_dim=8, experts=(0, 1, 2)),
    "olmoe": _llama(experts=(0, 1, 2)),
    "vit": ByHand("vit.layers.{}.attention.o_proj", "vit.layers.{}.mlp.fc2"),
    "deit": _DEIT,
    "deit distilled": _DEIT,
    "swin": ByHand(
        "swin.encoder.layers.{}.attention.o_proj",
        "swin.encoder.layers.{}.mlp.fc2",
        heads=(3, 3, 6, 6),
        mlp_widths=(15, 15, 30, 30),
        blocks=STAGES,
    ),
    "dinov2": ByHand("encoder.layer.{}.attention.o_proj", "encoder.layer.{}.mlp.fc2", head_dim=5, mlp_widths=(15, 15, 15)),
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "bert": _bert("bert."),
    "bert classes": _bert("bert."),
    "bert embeddings": _bert(""),
    "roberta": _bert("roberta."),
    "xlm-roberta": _bert(""),
    "distilbert": ByHand(
        f"{_DISTILBERT}.attention.out_lin",
        f"{_DISTILBERT}.ffn.lin2",
        heads_from=tuple(f"{_DISTILBERT}.attention.{name}_lin" for name in "qkv"),
        mlp_from=(f"{_DISTILBERT}.ffn.lin1",),
    ),
    "modernbert": ByHand(
        "model.layers.{}.attn.Wo",
        "model.layers.{}.mlp.Wo",
        heads_from=("model.layers.{}.attn.Wqkv",),
        mlp_from=("model.layers.{}.mlp.Wi",),
    ),
    "timm vit": _TIMM_VIT,
    "timm deit distilled": _TIMM_VIT,
    "timm swin": ByHand(
        "layers.{}.attn.proj", "layers.{}.mlp.fc2", heads=(3, 3, 6, 6), mlp_widths=(15, 15, 30, 30), blocks=STAGES
    ),
}

every_family = pytest.mark.parametrize("name", FAMILIES_TINY)
every_kind = pytest.mark.parametrize("kind", [HEAD, MLP, KV_GROUP])


def some_units(by_hand: ByHand, kind: str) -> list[Unit]:
    """Two of the first block, one of the middle, and the last of the last, which for an MLP is the odd group."""
    last = len(by_hand.blocks) - 1
    end = (by_hand.mlp_widths[last] - 1) // GROUP if kind == MLP else by_hand.heads[last] - 1
    places = [(0, 0), (0, 2), (1, 1), (last, end)]
    if kind == KV_GROUP:  # of as many heads
        places = [(layer, index // by_hand.per_kv) for layer, index in places]
    return [Unit(kind, layer, index, GROUP) for layer, index in places]


def without_columns(model: nn.Module, by_hand: ByHand, units: list[Unit]) -> nn.Module:
    """A copy in which nothing of the units reaches the residual stream, by weights alone."""
    model = copy.deepcopy(model)
    for unit in units:
        projection = by_hand.projection(model, unit)
        weight = projection.down_proj if hasattr(projection, "down_proj") else projection.weight
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad():
            if "c_proj" in by_hand.out:  # GPT-2's Conv1D: a row for each input
                weight[by_hand.columns(unit), :] = 0
            else:
                weight[..., by_hand.columns(unit)] = 0
    return model


@every_family
@every_kind
def test_a_zeroed_model_gives_the_logits_of_one_whose_weight_columns_are_zeroed_by_hand(name: str, kind: str) -> None:
    model, by_hand = FAMILIES_TINY[name](), BY_HAND[name]
    batch = tiny_batch(model)
    dense = logits_of(model, batch)
    units = some_units(by_hand, kind)
    for chosen in ([units[0]], [units[-1]], units):
        truth = logits_of(without_columns(model, by_hand, chosen), batch)
        with zeroed(model, chosen):
            found = logits_of(model, batch)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        assert (found - dense).abs().max() > 1e-3, "the units do nothing in this model, so that nothing was tested"


@every_family
def test_the_candidates_are_the_heads_and_groups_that_the_config_says(name: str) -> None:
    by_hand = BY_HAND[name]
    heads = [Unit(HEAD, layer, h) for layer, n in enumerate(by_hand.heads) for h in range(n)]
    groups = [Unit(MLP, layer, q, GROUP) for layer, n in enumerate(by_hand.mlp_widths) for q in range(-(-n // GROUP))]
    model = FAMILIES_TINY[name]()
    assert candidate_units(model, HEAD) == heads
    assert candidate_units(model, MLP, GROUP) == groups
    assert candidate_units(model, "both", GROUP) == heads + groups
    kv_groups = [Unit(KV_GROUP, layer, k) for layer, n in enumerate(by_hand.heads) for k in range(n // by_hand.per_kv)]
    assert candidate_units(model, KV_GROUP) == kv_groups
    assert candidate_units(model, "kv_group+mlp", GROUP) == kv_groups + groups


@every_family
@every_kind
def test_the_parameters_that_make_a_unit_do_nothing_once_it_is_zeroed(name: str, kind: str) -> None:
    model, by_hand = FAMILIES_TINY[name](), BY_HAND[name]
    if anatomy(model)[0].norm_over_heads and kind != MLP:
        pytest.skip("a norm over all heads makes each head's queries part of the others'")
    batch, rng = tiny_batch(model), torch.Generator().manual_seed(1)
    for unit in some_units(by_hand, kind)[1:]:
        dense = logits_of(model, batch)
        with zeroed(model, [unit]):
            before = logits_of(model, batch)
        for part in layer_of(anatomy(model), unit).slices(unit):
            if not part.over_inputs:
                part.of(part.parameter.data).normal_(generator=rng)
        assert (logits_of(model, batch) - dense).abs().max() > 1e-3
        with zeroed(model, [unit]):
            torch.testing.assert_close(logits_of(model, batch), before, rtol=1e-5, atol=1e-6)


@every_family
@every_kind
def test_the_units_of_a_block_share_its_projections_out_among_them_without_gap_or_overlap(name: str, kind: str) -> None:
    model, by_hand = FAMILIES_TINY[name](), BY_HAND[name]
    for layer, (block, read) in enumerate(zip(by_hand.blocks, anatomy(model), strict=True)):
        owners = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        names = {id(p): key for key, p in model.named_parameters()}
        for unit in candidate_units(model, kind, GROUP):
            if unit.layer == layer:
                for part in read.slices(unit):
                    part.of(owners[names[id(part.parameter)]]).add_(1)
        owned = {key for key, count in owners.items() if count.any()}
        assert all((owners[key] == 1).all() for key in owned)
        assert owned == _owned_by_hand(model, by_hand, kind, block, layer)


def _owned_by_hand(model: nn.Module, by_hand: ByHand, kind: str, block: str, layer: int) -> set[str]:
    """The tensors of a block's attention or MLP, without norms, position tables, shared K/V heads and the output's bias."""
    path = (by_hand.mlp_out if kind == MLP else by_hand.out).format(block)
    parent = path.rpartition(".")[0]
    if by_hand.heads_from:
        made_by = [name.format(block) for name in (by_hand.mlp_from if kind == MLP else by_hand.heads_from)]
        return {f"{path}.weight"} | {key for key, _ in model.named_parameters() if key.rpartition(".")[0] in made_by}
    if kind == MLP and layer in by_hand.experts:
        return {f"{parent}.experts.gate_up_proj", f"{parent}.experts.down_proj"}
    heads = ("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value", "qkv")
    inputs = ("fc1", "c_fc", "dense_h_to_4h", "gate_proj", "up_proj") if kind == MLP else heads
    wanted = {*inputs} - ({"k_proj", "v_proj"} if by_hand.shared_kv and kind == HEAD else set())
    keys = [key for key, _ in model.named_parameters() if key.startswith(parent + ".")]
    return {f"{path}.weight"} | {key for key in keys if key.removeprefix(parent + ".").split(".")[0] in wanted}


def test_every_family_has_a_tiny_model_that_is_tested() -> None:
    assert {family_of(build()) for build in FAMILIES_TINY.values()} == set(FAMILIES)
    assert set(BY_HAND) == set(FAMILIES_TINY)


def test_the_lists_by_task_hold_the_tiny_models_of_that_task() -> None:
    lists = {"text": CAUSAL, "image": IMAGES, "masked text": MASKED, "text classes": TEXT_CLASSES}
    lists |= {"text embeddings": TEXT_EMBEDDINGS, "image embeddings": TOWERS}
    assert {name: task_of(build()) for name, build in FAMILIES_TINY.items()} == {
        name: task for task, names in lists.items() for name in names
    }


def test_a_head_that_stands_for_more_than_the_model_width_is_read_from_the_projection_not_from_the_width() -> None:
    layer = anatomy(FAMILIES_TINY["gemma"]())[0]
    assert (layer.width, layer.heads, layer.kv_heads, layer.head_dim) == (12, 3, 1, 8)


def test_an_unknown_module_is_refused_with_the_names_of_the_known_families() -> None:
    with pytest.raises(UnsupportedModel, match=r"Linear.*gpt2, opt, .*timm/SwinTransformer"):
        anatomy(nn.Linear(2, 2))


def test_an_unknown_model_type_is_refused_with_the_names_of_the_known_families() -> None:
    shape = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4, "vocab_size": 8}
    with pytest.raises(UnsupportedModel, match=r"'electra'.*gpt2, opt, .*timm/SwinTransformer"):
        anatomy(tf.ElectraForMaskedLM(tf.ElectraConfig(**shape)))


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("gpt2", "transformer"),
        ("opt", "model"),
        ("llama", "model"),
        ("vit", "vit"),
        ("swin", "swin"),
        ("bert", "bert"),
        ("roberta", "roberta"),
        ("distilbert", "distilbert"),
        ("modernbert", "model"),
    ],
)
def test_a_base_model_without_its_head_has_the_blocks_of_the_whole_and_gives_embeddings(name: str, base: str) -> None:
    model = FAMILIES_TINY[name]()
    inner = model.get_submodule(base)
    whole, alone = anatomy(model), anatomy(inner)
    assert [layer.block for layer in alone] == [layer.block for layer in whole]
    assert [f"{base}.{layer.name}" for layer in alone] == [layer.name for layer in whole]
    assert task_of(inner) == ("image embeddings" if name in IMAGES else "text embeddings")


def test_an_mlp_that_packs_two_projections_into_one_is_refused_rather_than_misread() -> None:
    model = VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=3, num_classes=5, mlp_layer=GluMlp)
    with pytest.raises(UnsupportedModel, match=r"blocks\.0.*48.*24"):  # channels that come out of one, and enter the other
        anatomy(model)


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        (Unit(HEAD, 1, 3), r"head 1\.3.* 3 "),
        (Unit(KV_GROUP, 1, 3), r"kv_group 1\.3.* 3 K/V groups"),
        (Unit(MLP, 1, 4, GROUP), r"mlp 1\.4.* 4 .* 4 channels"),
        (Unit(HEAD, 3, 0), r"head 3\.0.* 3 blocks"),
    ],
)
def test_a_unit_out_of_range_is_an_error_that_says_what_there_is(unit: Unit, says: str) -> None:
    layers = anatomy(FAMILIES_TINY["gpt2"]())
    with pytest.raises(SelectionError, match=says):
        layer_of(layers, unit).ranges(unit)


@every_family
@every_kind
def test_a_unit_is_one_range_of_the_input_of_its_halfs_output_projection(name: str, kind: str) -> None:
    model, by_hand = FAMILIES_TINY[name](), BY_HAND[name]
    layers = anatomy(model)
    for unit in candidate_units(model, kind, GROUP):
        layer = layer_of(layers, unit)
        (found,) = layer.ranges(unit)
        assert list(found.channels) == by_hand.columns(unit)
        assert found.projection is by_hand.projection(model, unit)
        assert found.side == unit.side
        assert layer.size(unit) == len(by_hand.columns(unit))


def test_a_slice_takes_its_range_of_any_tensor_of_the_parameters_shape() -> None:
    unit = Unit(HEAD, 0, 1)
    q, bias, *_, out = anatomy(FAMILIES_TINY["gpt2"]())[0].slices(unit)
    columns: Tensor = torch.arange(36).expand(12, 36)  # Conv1D: (inputs, outputs)
    assert q.of(columns)[0].tolist() == [4, 5, 6, 7]
    assert bias.of(torch.arange(36)).tolist() == [4, 5, 6, 7]
    assert out.of(torch.arange(12)[:, None].expand(12, 12))[:, 0].tolist() == [4, 5, 6, 7]


class Block(nn.Module):
    """A plain transformer block of somebody's own: 3 heads of 4, an MLP of 14."""

    def __init__(self) -> None:
        super().__init__()
        attend: Any = nn.ModuleDict({name: nn.Linear(12, 12) for name in ("q", "k", "v", "o")})
        attend.num_heads = 3
        self.attend = attend
        self.up, self.down = nn.Linear(12, 14), nn.Linear(14, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.attend[name](x).unflatten(-1, (-1, 4)).transpose(1, 2) for name in ("q", "k", "v"))
        x = x + self.attend["o"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        moved: Tensor = x + self.down(F.relu(self.up(x)))
        return moved


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks, self.head = nn.Embedding(8, 12), nn.ModuleList(Block() for _ in range(2)), nn.Linear(12, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x).mean(1)[:, 0]
        return found


def test_a_family_added_at_run_time_is_measured_with_a_loss_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Family("text", "blocks", "attend", ("q", "k", "v"), "o", ("up",), "down")
    monkeypatch.setitem(FAMILIES, "OwnModel", row)
    torch.manual_seed(0)
    model = OwnModel().eval()
    batches = [{"tokens": torch.randint(0, 8, (3, 5)), "goal": torch.randn(3)} for _ in range(2)]

    def squared(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        wrong: Tensor = model(batch["tokens"]) - batch["goal"]
        return wrong**2

    unit = Unit(MLP, 1, 0, GROUP)
    base, masked, *_ = next(DamageMeter(model, iter(batches), loss=squared).measure([(unit, (0, 1))]))
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].down.weight[:, :GROUP] = 0
        expected = [[float(squared(one, batch).mean()) for batch in batches] for one in (model, other)]
    assert [*base] == pytest.approx(expected[0], rel=1e-6) and [*masked] == pytest.approx(expected[1], rel=1e-6)
