"""Pretraining: ordinary central training with a cosine over epochs, resumable, and a start for experiments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tailorfl
from runs.small import facts, first_job, simulation_of
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.models.registry import build
from tailorfl.runs.pretrain import Epoch, Pretrained, Watcher, central, check_output, running
from tailorfl.settings.loading import load

DATA = {"samples": 200}
MLP = {"name": "mlp", "hidden": [8]}
RESNET = {"name": "resnet10", "width": 8, "stem": "cifar"}
TRAIN = {"batch_size": 32, "lr": 0.1}


class Killed(Exception):
    """The process dies."""


class Dies(Watcher):
    """Stops the training after some epochs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def epoch_done(self, epoch: Epoch) -> None:
        if epoch.epoch == self.after:
            raise Killed


def pretrain(out: Path, **settings: Any) -> Pretrained:
    changes = {"data": DATA, "model": MLP, "rounds": 3, **settings}
    return tailorfl.pretrain(out=out, **{"train": TRAIN, **changes})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_a_plain_loop_with_a_cosine_over_epochs(tmp_path: Path, momentum: float) -> None:
    train = {**TRAIN, "momentum": momentum, "weight_decay": 0.01}
    found = pretrain(tmp_path / "w.safetensors", train=train)
    config = central(load(None, {"data": DATA, "model": MLP, "rounds": 3, "train": train}))
    sim = simulation_of(first_job(config))
    source = sim.federation.source
    module = build("mlp", (1, 8, 8), 10, hidden=[8])
    module.load_state_dict(dict(sim.init.items()))
    for epoch in range(3):
        lr = 0.05 * (1 + math.cos(math.pi * epoch / 3))
        assert found.epochs[epoch].lr == pytest.approx(lr)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, weight_decay=0.01)
        sim.round = epoch
        plan = sim.cohort((0,)).plan((0,), "train", 32, 1, None, 0)
        losses = []
        for rows, count in zip(plan.rows[0], plan.count[0], strict=True):
            at = torch.from_numpy(rows[:count])
            loss = nn.functional.cross_entropy(module(source.take(at)), source.y[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert found.epochs[epoch].loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    for name, tensor in load_file(found.weights).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_all_training_samples_are_in_one_place(tmp_path: Path) -> None:
    data = {"clients": 7, "partition": "dirichlet", **DATA}
    found = pretrain(tmp_path / "w.safetensors", rounds=1, data=data)
    report = facts(found.report)
    assert report["samples"] == {"train": 140, "val": 20, "test": 40}
    assert (report["settings"]["data"]["clients"], report["settings"]["data"]["partition"]) == (1, "iid")


def test_the_files_hold_everything(tmp_path: Path) -> None:
    found = pretrain(tmp_path / "net.safetensors", model=RESNET, rounds=2)
    tensors = load_file(found.weights)
    net = build("resnet10", (1, 8, 8), 10, width=8, stem="cifar")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in net.state_dict().items()}
    assert int(tensors["bn1.num_batches_tracked"]) == 2 * 5
    assert not torch.equal(tensors["bn1.running_var"], torch.ones(8))
    report = facts(tmp_path / "net.json")
    assert report["weights"] == "net.safetensors"
    assert report["metric"] == found.metric == "accuracy"
    assert report["scalars"] == found.scalars == sum(t.numel() for t in tensors.values())
    assert [e["epoch"] for e in report["epochs"]] == [1, 2]
    assert report["seconds"] == pytest.approx(sum(e["seconds"] for e in report["epochs"]))
    assert report["settings"]["model"]["width"] == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.json", "net.safetensors"]


@pytest.mark.parametrize(("model", "after"), [(MLP, 4), (RESNET, 2)])
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path, model: dict[str, Any], after: int) -> None:
    settings = {"model": model, "rounds": 4, "train": {**TRAIN, "optimizer": "adamw", "lr": 1e-3}}
    whole = pretrain(tmp_path / "whole.safetensors", **settings)
    out = tmp_path / "cut.safetensors"
    with pytest.raises(Killed):
        pretrain(out, **settings, watch=Dies(after))
    assert not out.exists()
    assert (running(out) / "config.yaml").is_file()
    seen: list[int] = []

    class Sees(Watcher):
        def started(self, name: str, epochs: int, metric: str, done: int) -> None:
            seen.append(done)

    found = tailorfl.pretrain(out=out, resume=True, watch=Sees())
    assert seen == [after]
    assert not running(out).exists()
    expected, got = load_file(whole.weights), load_file(found.weights)
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    for a, b in zip(whole.epochs, found.epochs, strict=True):
        assert (a.epoch, a.lr, a.loss, a.val, a.test) == (b.epoch, b.lr, b.loss, b.val, b.test)


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": [64]}, RESNET], ids=["mlp", "resnet"])
def test_experiments_start_from_it(tmp_path: Path, model: dict[str, Any]) -> None:
    """The body and its running statistics are the file's, the head is drawn; so a run begins, and is better for it."""
    alone = model is RESNET  # of running statistics; that the start helps, the quick model shows
    settings: dict[str, Any] = {"rounds": 1} if alone else {"rounds": 6, "data": {}}
    found = pretrain(tmp_path / "w.safetensors", model=model, train={**TRAIN, "momentum": 0.9}, **settings)
    saved = load_file(found.weights)
    settings = {"method": "fedavg", "seeds": 1, "rounds": 2, "train": {"lr": 0.05, "batch_size": 8}}
    settings |= {"data": {"clients": 3, "samples": 150, "partition": "iid"}}
    start = {**model, "weights": str(found.weights), "skip_head": True}
    sim = simulation_of(first_job(settings, model=start))
    head = {"head.weight", "head.bias", "fc.weight", "fc.bias"}
    for name, tensor in sim.init.items():
        assert torch.equal(tensor, saved[name]) == (name not in head), name
    if alone:
        return
    warm = tailorfl.run(out=tmp_path / "warm", **settings, model=start)
    cold = tailorfl.run(out=tmp_path / "cold", **settings, model=model)
    assert warm.jobs[0][0]["metrics"]["mean"] > cold.jobs[0][0]["metrics"]["mean"] + 0.3


def test_frozen_tensors_are_in_the_file_too(tmp_path: Path) -> None:
    found = pretrain(tmp_path / "w.safetensors", model={**RESNET, "trainable": "head"}, rounds=1)
    tensors = load_file(found.weights)
    assert set(tensors) == set(build("resnet10", (1, 8, 8), 10, width=8, stem="cifar").state_dict())
    model, train = {**RESNET, "weights": str(found.weights)}, {"lr": 1e-9}
    again = pretrain(tmp_path / "v.safetensors", model=model, rounds=1, train=train)
    torch.testing.assert_close(load_file(again.weights)["conv1.weight"], tensors["conv1.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"steps": 5}}, "epochs as rounds"),
        ({"train": {"epochs": 2}}, "epochs as rounds"),
        ({"train": {"dp": {"clip": 1.0, "noise": 1.0}}}, "needs? no privacy"),
        ({"train": {"round_schedule": "step"}}, "train.round_schedule"),
        ({"model": {"name": "logistic", "larger": ["mlp"]}}, "one model"),
        ({"variants": {"a": {"rounds": 1}}}, "one model"),
        ({"model": {"name": "resnet10", "widht": 8}}, "Did you mean 'width'"),
        ({"data": {"augment": "flip"}}, "uint8 images"),
        ({"data": {"excluded_clients": ["1"]}}, "cannot leave any out"),
    ],
)
def test_what_it_cannot_follow_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        pretrain(tmp_path / "w.safetensors", **settings)
    assert not list(tmp_path.iterdir())


def test_files_are_not_replaced_by_mistake(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(RunError, match=r"data\.json"):
        check_output(tmp_path / "data.safetensors", resume=False, overwrite=False)
    out = tmp_path / "w.safetensors"

    def refused(said: str, error: type[Exception] = RunError, **options: Any) -> None:
        with pytest.raises(error, match=said):
            tailorfl.pretrain(**{"out": out, **options})

    new = {"data": DATA, "model": MLP, "train": TRAIN, "rounds": 1}
    refused(r"\.safetensors file", ConfigError, **{**new, "out": tmp_path / "w.pt"})
    refused("was never started", resume=True)
    first = pretrain(out, rounds=1)
    refused("exists already", **new)
    refused("is finished", resume=True)
    refused("give only out", ConfigError, resume=True, rounds=2)
    with pytest.raises(Killed):
        pretrain(out, overwrite=True, watch=Dies(1))
    refused("not finished", **new)
    again = pretrain(out, rounds=1, overwrite=True)
    assert again.epochs[0].loss == first.epochs[0].loss
    assert not running(out).exists()
