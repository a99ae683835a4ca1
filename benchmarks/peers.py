"""Torch-Pruning and OptiPFair beside Secateur's scores, on the same batches and as many channels: python benchmarks/peers.py

OptiPFair takes the same share of the MLP channels from every layer of a gated language model. Torch-Pruning takes MLP channels
of an image model wherever its grouped Taylor importance is least. Secateur's methods choose among single channels, as many as
the peer removed, of any layer; they are zeroed, which gives the loss of a cut without repair. Each model is judged on data that
chose nothing. Both peers are from the Python registry, and best kept apart:

    pip install --no-deps --target peers torch-pruning==1.6.1 optipfair==0.4.2
    PYTHONPATH=peers python benchmarks/peers.py --image-model DEIT --images IMAGENETTE --text-model SMOLLM2 --texts WIKITEXT2

With --keep-flops 0.8 --out FOLDER whole cuts are compared instead: the peer's, of as many MLP channels as leave that share of
the FLOPs, and those of `secateur prune` by its own search and by the rules of LLM-Pruner and ZipLM, from the same batches,
before and after repair. FOLDER keeps the checkpoints; started again it goes on.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import secateur as sc
from secateur.measure.evaluate import evaluate
from secateur.measure.flops import count
from secateur.methods import METHODS
from secateur.model.accounting import total_parameters, zeroed_percent
from secateur.model.families import anatomy, candidate_units
from secateur.model.loading import mend_torchvision
from secateur.model.losses import Batch, batch_loss, outputs
from secateur.model.zeroing import zeroed
from secateur.search.goals import Count
from secateur.search.policies import GRADIENT_PASSES, Budget
from secateur.search.scores import unit_scores, unit_set
from secateur.search.select import select_by_score
from secateur.settings import make_job
from secateur.steps import calibration_of, evaluation_of, open_job

OURS = ("auto", "magnitude", "taylor", "fisher", "obs", "flap", "llmpruner", "kwon")
Peer = Callable[[Any, Any, Sequence[Batch], float], None]  # cuts a model in place by a share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--text-model", "--texts", "--image-model", "--images"):
        parser.add_argument(option)
    parser.add_argument("--share", type=float, default=0.1, help="of the MLP channels; 0.1 is a tenth")
    parser.add_argument("--batches", type=int, default=8, help="calibration batches")
    parser.add_argument("--evaluation", type=int, default=160, help="texts or images that judge")
    parser.add_argument("--keep-flops", type=float, help="compare cuts that leave this share of the FLOPs")
    parser.add_argument("--out", type=Path, help="a folder for these cuts")
    parser.add_argument("--budget", default="80forwards", help="of the search for these cuts")
    given = parser.parse_args()
    if (given.keep_flops is None) != (given.out is None):
        parser.error("--keep-flops and --out go together")
    for name, registry, peer, model, data in (
        ("OptiPFair", "optipfair", optipfair_cut, given.text_model, given.texts),
        ("Torch-Pruning", "torch-pruning", torch_pruning_cut, given.image_model, given.images),
    ):
        if not (model and data):
            continue
        mend_torchvision()  # the peers import transformers on their own
        try:
            package = importlib.import_module(registry.replace("-", "_"))
        except ImportError:
            print(f"{name} is not installed: pip install --no-deps --target peers {registry}, then PYTHONPATH=peers.")
            continue
        compared = compare if given.keep_flops is None else compare_cuts
        compared(f"{name} {version(registry)}", package, peer, model, data, given)


def compare_cuts(name: str, package: Any, peer: Peer, model: str, data: str, given: argparse.Namespace) -> None:
    text = data == given.texts
    asked: dict[str, Any] = {"calibration": data, "device": "cpu", "budget": given.budget, "evaluation_batches": 0}
    asked |= {"calibration_size": 4 * given.batches if text else 8 * given.batches, "evaluation_size": given.evaluation}
    opened, job = open_job(make_job(model, **asked), sc.Watcher())
    network, batches = opened.model, calibration_of(opened, job.settings, sc.Watcher())
    evaluation = evaluation_of(opened, job)
    dense = evaluate(network, evaluation)
    print(f"\n{opened.name}: {shown(dense)} dense, on {len(evaluation)} batches; {given.keep_flops:.0%} of the FLOPs asked for")
    print("| cut by | FLOPs left | parameters left | zeroed | as written | seconds |\n|---|---|---|---|---|---|")
    whole = flops_of(network, batches[0])
    smaller = copy.deepcopy(network)
    peer(package, smaller, batches, given.share)  # FLOPs are linear in the share, so that one trial tells the right one
    share = given.share * (1 - given.keep_flops) / (1 - flops_of(smaller, batches[0]) / whole)
    smaller, started = copy.deepcopy(network), time.perf_counter()
    peer(package, smaller, batches, share)
    seconds, left = time.perf_counter() - started, flops_of(smaller, batches[0]) / whole
    params = total_parameters(smaller) / total_parameters(network)
    print(f"| {name} | {left:.1%} | {params:.1%} | - | {shown(evaluate(smaller, evaluation))} | {seconds:.0f} |", flush=True)
    asked |= {"target": "kv_group+mlp" if text else "both", "keep_flops": given.keep_flops, "repair": "auto", "measure": False}
    for method in ("auto", "llmpruner", "obs"):
        started = time.perf_counter()
        more = {} if method == "auto" else {"method": method, "budget": None, "score_batches": given.batches}
        settings = {key: value for key, value in (asked | more).items() if value is not None}
        cut = sc.prune(model, out=given.out / f"{Path(model).name}-{method}", **settings).cut
        assert cut and cut.zeroed and cut.shrunk and cut.goal
        share, figures = cut.params / cut.dense_params, f"{shown(cut.zeroed)} | {shown(cut.shrunk)}"
        seconds = time.perf_counter() - started
        print(f"| {METHODS[method].label} | {cut.goal.got:.1%} | {share:.1%} | {figures} | {seconds:.0f} |", flush=True)


def flops_of(model: Any, batch: Batch) -> int:
    with torch.no_grad():
        return count(lambda: outputs(model, batch))


def shown(found: Any) -> str:
    return f"{found.top1:.2%} top-1" if found.top1 is not None else f"perplexity {found.perplexity:.2f}"


def compare(name: str, package: Any, peer: Peer, model: str, data: str, given: argparse.Namespace) -> None:
    job = make_job(model, calibration=data, evaluation_size=given.evaluation, evaluation_batches=0, device="cpu")
    opened, job = open_job(job, sc.Watcher())
    calibration = calibration_of(opened, job.settings, sc.Watcher())[: given.batches]
    evaluation = evaluation_of(opened, job)
    network, dense = opened.model, evaluate(opened.model, evaluation).loss
    print(f"\n{opened.name}: {total_parameters(network):,} parameters, loss {dense:.4f} on {len(evaluation)} batches")
    print("| method | channels removed | parameters removed | loss increase | seconds |\n|---|---|---|---|---|")

    smaller, started = copy.deepcopy(network), time.perf_counter()
    peer(package, smaller, calibration, given.share)
    seconds = time.perf_counter() - started
    pairs = zip(anatomy(network), anatomy(smaller), strict=True)
    removed = sum(before.mlp_width - after.mlp_width for before, after in pairs)
    percent = 100 * (1 - total_parameters(smaller) / total_parameters(network))
    show(name, removed, percent, evaluate(smaller, evaluation).loss - dense, seconds)

    units = candidate_units(network, "mlp", 1)
    for method in OURS:
        started = time.perf_counter()
        if method == "auto":
            policy = sc.Auto(Budget(GRADIENT_PASSES * len(calibration)))  # what the gradients of the others cost
            meter = sc.DamageMeter(network, calibration, batches_per_pull=1)
            chosen = sc.select(meter, units, policy=policy, goal=Count(removed))
        elif METHODS[method].search:
            chosen = unit_set(method, network, units, k=removed, batches=calibration)
        else:
            chosen = select_by_score(unit_scores(method, network, units, batches=calibration), goal=Count(removed))
        seconds = time.perf_counter() - started
        with zeroed(network, chosen.units):
            loss = evaluate(network, evaluation).loss
        show(METHODS[method].label, removed, zeroed_percent(network, chosen.units), loss - dense, seconds)


def show(name: str, removed: int, percent: float, increase: float, seconds: float) -> None:
    print(f"| {name} | {removed} | {percent:.2f}% | {increase:+.4f} | {seconds:.1f} |", flush=True)


def optipfair_cut(package: Any, model: Any, batches: Sequence[Batch], share: float) -> None:
    """Its default importance, with activations of the same batches."""
    inputs = [{"input_ids": row} for batch in batches for row in batch["input_ids"]]
    loader: Any = DataLoader(inputs, batch_size=len(batches[0]["input_ids"]))  # type: ignore[arg-type]
    package.prune_model(model, pruning_type="MLP_GLU", pruning_percentage=100 * share, dataloader=loader, show_progress=False)


def torch_pruning_cut(package: Any, model: Any, batches: Sequence[Batch], share: float) -> None:
    """Its grouped Taylor importance, with gradients of the same batches, globally over the MLPs."""
    model.requires_grad_(True)
    batches = [{name: x.clone() for name, x in batch.items()} for batch in batches]  # images are read in inference mode
    for batch in batches:
        (batch_loss(model, batch) / len(batches)).backward()
    rows = {id(module) for layer in anatomy(model) for module in layer.mlp_in}
    others = [module for module in model.modules() if not list(module.children()) and id(module) not in rows]
    pruner = package.pruner.BasePruner(
        model,
        example_inputs={"pixel_values": batches[0]["pixel_values"][:1]},
        importance=package.importance.GroupTaylorImportance(),
        global_pruning=True,
        pruning_ratio=share,
        ignored_layers=others,
        output_transform=lambda found: found.logits.sum(),
    )
    pruner.step()
    model.zero_grad()


if __name__ == "__main__":
    main()
