"""A tiny random model of every family, with the traits that make the family hard: nothing is loaded, all is milliseconds.

Every MLP width leaves an odd last group when it is cut by GROUP, but not that of experts: torch multiplies the weights of
all experts at once only if a row of them is a multiple of 16 bytes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

from secateur.model.families import task_of
from secateur.model.losses import batch_loss, predictions, reference_of
from secateur.model.zeroing import zeroed
from secateur.tasks import TASKS
from secateur.units import EXPERT, KINDS, TARGETS, Unit

tf: Any = transformers  # its model classes are not typed

GROUP = 4
# Parts of a block, which every model has. tests/test_experts.py is about experts, tests/test_wholes.py about whole sub-layers.
EVERYWHERE = [target for target, kinds in TARGETS.items() if not any(kind == EXPERT or KINDS[kind].whole for kind in kinds)]
VOCABULARY, CLASSES, IMAGE = 32, 5, 16


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode with every parameter drawn anew, so that no bias is 0 and no norm is 1."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=rng)
            if parameter.dim() == 1 and name.endswith("weight"):  # the gain of a norm
                parameter.add_(1)
    return model.eval()


def tiny_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A batch in the form of losses.py: 3 texts of 10 tokens, the first 2 labels of one left out, or 3 images.

    An encoder's third text has 3 tokens of padding. A model without a head has its own outputs as the reference.
    """
    rng = torch.Generator().manual_seed(seed)
    task = task_of(model)
    images = torch.randn(3, 3, IMAGE, IMAGE, generator=rng) if TASKS[task].inputs == "image" else None
    classes = torch.randint(0, CLASSES, (3,), generator=rng) if task in ("image", "text classes") else None
    input_ids = torch.randint(3, VOCABULARY, (3, 10), generator=rng)
    labels = input_ids.clone()
    labels[1, :2] = -100
    if task == "text":
        return {"input_ids": input_ids, "labels": labels}
    mask = torch.ones_like(input_ids)
    mask[2, 7:] = 0
    batch = {"input_ids": input_ids, "attention_mask": mask} if images is None else {"pixel_values": images}
    if TASKS[task].embeds:
        with torch.no_grad():
            return batch | {"reference": reference_of(model, batch)}
    hidden = torch.rand(input_ids.shape, generator=rng) < 0.4
    return batch | {"labels": input_ids.masked_fill(~hidden | (mask == 0), -100) if classes is None else classes}


def tiny_batches(model: nn.Module, n: int) -> list[dict[str, Tensor]]:
    return [tiny_batch(model, seed) for seed in range(n)]


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return predictions(model, batch)


def loss_without(model: nn.Module, batch: dict[str, Tensor], units: Iterable[Unit]) -> float:
    """The loss of one whole run of the model, these units zeroed."""
    with torch.inference_mode(), zeroed(model, units):
        return float(batch_loss(model, batch))


def hook_count(model: nn.Module) -> int:
    """Every hook of every kind, in every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def _text(model: Any, config: Any, **fields: Any) -> nn.Module:
    shape = {"max_position_embeddings": 16, "num_hidden_layers": 3}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return randomised(model(config(**(shape | fields), **tokens)))


def _grouped(model: Any, config: Any, **fields: Any) -> nn.Module:
    """4 query heads over 2 K/V heads and a gated MLP, unless the fields say otherwise."""
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 14}
    return _text(model, config, **(shape | fields))


def _encoder(model: Any, config: Any, **fields: Any) -> nn.Module:
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return randomised(model(config(max_position_embeddings=19, cls_token_id=0, sep_token_id=1, **tokens, **fields)))


def _tower(model: Any, config: Any, **fields: Any) -> nn.Module:
    shape = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 3}
    return randomised(model(config(image_size=IMAGE, patch_size=8, **(shape | fields))))


def _image(model: Any, config: Any, **fields: Any) -> nn.Module:
    return randomised(model(config(image_size=IMAGE, num_labels=CLASSES, **fields)))


def _timm(model: Any, **fields: Any) -> nn.Module:
    return randomised(model(img_size=IMAGE, num_classes=CLASSES, **fields))


_GPT2: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "n_inner": 14}
_OPT: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "ffn_dim": 14}
_NEOX: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 14, "tie_word_embeddings": False}
_WIDE_HEADS: dict[str, Any] = {"hidden_size": 12, "head_dim": 8}  # the heads together are wider than the model
_GEMMA2: dict[str, Any] = _WIDE_HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}
_EXPERTS: dict[str, Any] = {"intermediate_size": 16, "num_experts_per_tok": 2}  # and 4 experts
_QWEN_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
_DENSE_LAST: dict[str, Any] = _QWEN_EXPERTS | {"mlp_only_layers": [2]}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_VIT: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 14, "num_hidden_layers": 3}
_BERT: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 14, "num_hidden_layers": 3}
_TIMM_VIT: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "mlp_ratio": 1.25, "depth": 3, "patch_size": 8}
_SWIN: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (3, 6), "mlp_ratio": 1.25}
_WINDOWS: dict[str, Any] = {"patch_size": 2, "window_size": 2}  # 8 x 8 patches, so that odd blocks shift their windows

FAMILIES_TINY: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _text(tf.GPT2LMHeadModel, tf.GPT2Config, **_GPT2),
    "opt": lambda: _text(tf.OPTForCausalLM, tf.OPTConfig, word_embed_proj_dim=12, **_OPT),
    "opt post-norm": lambda: _text(tf.OPTForCausalLM, tf.OPTConfig, word_embed_proj_dim=6, do_layer_norm_before=False, **_OPT),
    "gpt_neox": lambda: _text(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, **_NEOX),
    "gpt_neox sequential": lambda: _text(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, use_parallel_residual=False, **_NEOX),
    "llama": lambda: _grouped(tf.LlamaForCausalLM, tf.LlamaConfig),
    "llama mha": lambda: _grouped(tf.LlamaForCausalLM, tf.LlamaConfig, num_key_value_heads=4),
    "mistral": lambda: _grouped(tf.MistralForCausalLM, tf.MistralConfig, sliding_window=4),
    "smollm3": lambda: _grouped(tf.SmolLM3ForCausalLM, tf.SmolLM3Config, no_rope_layers=[1, 0, 1]),
    "qwen2": lambda: _grouped(tf.Qwen2ForCausalLM, tf.Qwen2Config, hidden_size=24, num_attention_heads=6),
    "qwen3": lambda: _grouped(tf.Qwen3ForCausalLM, tf.Qwen3Config, **_WIDE_HEADS),
    "gemma": lambda: _grouped(tf.GemmaForCausalLM, tf.GemmaConfig, num_attention_heads=3, num_key_value_heads=1, **_WIDE_HEADS),
    "gemma2": lambda: _grouped(tf.Gemma2ForCausalLM, tf.Gemma2Config, **_GEMMA2),
    "gemma3_text": lambda: _grouped(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, layer_types=_LAYER_TYPES, **_GEMMA2),
    "mixtral": lambda: _grouped(tf.MixtralForCausalLM, tf.MixtralConfig, num_local_experts=4, **_EXPERTS),
    "qwen2_moe": lambda: _grouped(tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, shared_expert_intermediate_size=10, **_DENSE_LAST),
    "qwen3_moe": lambda: _grouped(
        tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig, norm_topk_prob=True, **_QWEN_EXPERTS, **_WIDE_HEADS
    ),
    "olmoe": lambda: _grouped(tf.OlmoeForCausalLM, tf.OlmoeConfig, num_experts=4, **_EXPERTS),
    "vit": lambda: _image(tf.ViTForImageClassification, tf.ViTConfig, patch_size=8, **_VIT),
    "deit": lambda: _image(tf.DeiTForImageClassification, tf.DeiTConfig, patch_size=8, **_VIT),
    "deit distilled": lambda: _image(tf.DeiTForImageClassificationWithTeacher, tf.DeiTConfig, patch_size=8, **_VIT),
    "swin": lambda: _image(tf.SwinForImageClassification, tf.SwinConfig, **_SWIN, **_WINDOWS),
    "dinov2": lambda: _tower(tf.Dinov2Model, tf.Dinov2Config, hidden_size=15, mlp_ratio=1),  # a whole number
    "clip_vision_model": lambda: _tower(tf.CLIPVisionModel, tf.CLIPVisionConfig, intermediate_size=14),
    "siglip_vision_model": lambda: _tower(tf.SiglipVisionModel, tf.SiglipVisionConfig, intermediate_size=14),
    "bert": lambda: _encoder(tf.BertForMaskedLM, tf.BertConfig, **_BERT),
    "bert classes": lambda: _encoder(tf.BertForSequenceClassification, tf.BertConfig, num_labels=CLASSES, **_BERT),
    "bert embeddings": lambda: _encoder(tf.BertModel, tf.BertConfig, **_BERT),
    "roberta": lambda: _encoder(tf.RobertaForMaskedLM, tf.RobertaConfig, **_BERT),
    "xlm-roberta": lambda: _encoder(tf.XLMRobertaModel, tf.XLMRobertaConfig, **_BERT),
    "distilbert": lambda: _encoder(tf.DistilBertForMaskedLM, tf.DistilBertConfig, dim=12, n_heads=3, hidden_dim=14, n_layers=3),
    "modernbert": lambda: _encoder(
        tf.ModernBertForMaskedLM, tf.ModernBertConfig, local_attention=4, global_attn_every_n_layers=2, **_BERT
    ),
    "timm vit": lambda: _timm(VisionTransformer, **_TIMM_VIT),
    "timm deit distilled": lambda: _timm(VisionTransformerDistilled, **_TIMM_VIT),
    "timm swin": lambda: _timm(SwinTransformer, **_SWIN, **_WINDOWS),
}
# The families whose heads can be cut out. OLMoE's cannot: a norm runs over all of them together.
CUTTABLE = [name for name in FAMILIES_TINY if name != "olmoe"]

# By task; written down, since a model would have to be built to ask for its task. tests/model/test_families.py compares.
TIMM = ("timm vit", "timm deit distilled", "timm swin")
IMAGES = ("vit", "deit", "deit distilled", "swin", *TIMM)  # image classifiers
TOWERS = ("dinov2", "clip_vision_model", "siglip_vision_model")  # images to embeddings
MASKED = ("bert", "roberta", "distilbert", "modernbert")
TEXT_CLASSES = ("bert classes",)
TEXT_EMBEDDINGS = ("bert embeddings", "xlm-roberta")
TEXT_ENCODERS = tuple(name for name in FAMILIES_TINY if name in (*MASKED, *TEXT_CLASSES, *TEXT_EMBEDDINGS))
EMBEDDINGS = (*TOWERS, *TEXT_EMBEDDINGS)
CAUSAL = tuple(name for name in FAMILIES_TINY if name not in (*IMAGES, *TOWERS, *TEXT_ENCODERS))


def deep_gpt2() -> nn.Module:
    return _text(tf.GPT2LMHeadModel, tf.GPT2Config, num_hidden_layers=8, **_GPT2)


def deep_llama(n_layers: int = 8) -> nn.Module:
    """On a tiny batch a block gives 3 texts of 10 tokens and 16 channels, and as much enters its output projection."""
    return _grouped(tf.LlamaForCausalLM, tf.LlamaConfig, num_hidden_layers=n_layers)


def tiny_tokenizer(*, puts_bos: bool = False) -> Any:
    """Bytes and six merges: "the", " the" and " cat" are one token each, any other word a token for every letter.

    It has a beginning-of-text token in any case; `puts_bos` decides whether it comes before every text (OPT, Llama) or not
    (GPT-2).
    """
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("ca", "t"), ("Ġ", "cat")]  # Ġ is the space
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if puts_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def character_tokenizer(letters: str, *, unknown: bool = True, ends: bool = False, normalizer: Any = None) -> Any:
    """A token for each of the letters; others are unknown, or dropped. `ends` puts special tokens around a text."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", "<pad>", *letters])}
    if unknown:
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    else:
        made = Tokenizer(models.BPE(vocabulary, merges=[]))
    if normalizer:
        made.normalizer = normalizer
    if ends:
        special = [("<s>", 0), ("</s>", 1)]
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | ({"unk_token": "<unk>"} if unknown else {})
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is found, whatever the machine; what the hub's client then remembers is forgotten after the test."""

    def getaddrinfo(*args: Any, **settings: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


# Real weights and data for the slow tests, if there are any: deit-tiny/, deit-tiny-timm/, imagenette/, wikitext2/, lambada/.
REAL_DATA = Path(os.environ.get("SECATEUR_DATA", Path(__file__).parents[2] / "shared" / "data"))
SMOLLM2 = Path(__file__).parents[1] / ".cache" / "SmolLM2-135M-Instruct"
needs_smollm2 = pytest.mark.skipif(
    not (SMOLLM2 / "config.json").exists(), reason=f"no model in {SMOLLM2}: `make test` puts it there"
)
