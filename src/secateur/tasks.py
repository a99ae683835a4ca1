"""Tasks: what a model takes and what it gives, and which class of transformers loads it. Knows no model and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

TEXT, IMAGE = "text", "image"  # what a model takes; also the names of the two tasks of the paper
MASKED, TOKEN_CLASSES, TEXT_CLASSES = "masked text", "token classes", "text classes"
TEXT_EMBEDDINGS, IMAGE_EMBEDDINGS = "text embeddings", "image embeddings"


@dataclass(frozen=True)
class Task:
    """What a model does with its head."""

    inputs: str  # TEXT or IMAGE
    auto_class: str  # of transformers
    pipeline: str  # the hub's name for it, in model cards
    per_token: bool = False  # it gives logits for each token, else one row for each text or image
    embeds: bool = False  # it has no head: it gives embeddings, which have no labels


TASKS = {
    TEXT: Task(TEXT, "AutoModelForCausalLM", "text-generation", per_token=True),
    MASKED: Task(TEXT, "AutoModelForMaskedLM", "fill-mask", per_token=True),
    TEXT_CLASSES: Task(TEXT, "AutoModelForSequenceClassification", "text-classification"),
    TOKEN_CLASSES: Task(TEXT, "AutoModelForTokenClassification", "token-classification", per_token=True),
    IMAGE: Task(IMAGE, "AutoModelForImageClassification", "image-classification"),
    TEXT_EMBEDDINGS: Task(TEXT, "AutoModel", "feature-extraction", embeds=True),
    IMAGE_EMBEDDINGS: Task(IMAGE, "AutoModel", "image-feature-extraction", embeds=True),
}
