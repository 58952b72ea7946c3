"""What methods refuse: the class of the error, and the setting or the value that it names."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from methods.quadratics import MU, L, quadratic_simulation
from methods.settings import CLASSES, make
from methods.small import TRAIN, federation, model, simulation
from methods.test_lora_factors import simulation_with_lora
from tailorfl.core.client import Client
from tailorfl.core.method import make_method, methods
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, ModelError, TailorflError
from tailorfl.methods.fedcp import add_gate
from tailorfl.methods.feddbe import add_offset
from tailorfl.methods.feddpa import with_two_adapters
from tailorfl.methods.gpfl import add_condition
from tailorfl.methods.moon import project
from tailorfl.models.functional import Model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

NOISY = {"client_dp": ClientDP(clip=1.0, noise=1.0), "weights": "uniform"}
PRIVATE = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(1.0, 1.0, "shuffle"))
THEORY = {"local_steps": "theory", "smoothness": L, "convexity": MU}
BASE = federation()
WITHOUT_PUBLIC = replace(BASE, public=None)
COROLLARY = {"kind": "corollary", "radius": 1, "rho": 1, "samples": 5, "clients": 2}

OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("fedclup", {"lr_rule": "stochastic", "smoothness": 2.0}, "convexity"),
    ("fedclup", {"lr_rule": "stochastic", "convexity": 2.0}, "smoothness"),
    ("fedclup", {"lr_rule": "deterministic"}, "smoothness"),
    ("fedclup", {"gamma": "theory"}, "smoothness"),
    ("fedclup", {"gamma": "edge"}, "smoothness"),
    ("fedclup", {"local_steps": "theory"}, "smoothness"),
    ("fedclup", {**THEORY, "lam": 1.0, "gamma": "edge"}, "edge"),
    ("fedclup", {**THEORY, "lam": 0.0}, "λ > 0"),
    ("fedclup", {**THEORY, "schedule": {"kind": "heuristic", "switch": 1}}, "every λ"),
    ("fedclup", {"local_steps": 0}, "at least 1"),
    ("fedclup", {"smoothness": 1.0, "convexity": 2.0}, "must not be above"),
    ("fedclup", {"schedule": "corollary"}, "radius"),
    ("fedclup", {"schedule": COROLLARY}, "smoothness"),
    ("fedclup", {"lam": 0.0, "schedule": {"kind": "heuristic", "switch": 2}}, "heuristic"),
    ("fedclup", {"schedule": "growing"}, "growing|kind"),
    ("fedclup", {"schedule": {"kind": "dynamic", "values": [1, 0.5]}}, "rise"),
    ("fedclup", {"schedule": {"kind": "dynamic", "values": [-1, 0.5]}}, "rise"),
    ("fedclup", {"schedule": {"kind": "dynamic", "values": [1], "factor": 3}}, "leave out factor"),
    ("fedclup", {"schedule": {"kind": "dynamic", "start": 20}}, "above most"),
    ("fedclup", {"schedule": {"kind": "heuristic"}}, "switch"),
    ("ditto", {"dynamic_every": "step"}, "dynamic_lam"),
    ("ditto", {"dynamic_lam": [1.0, -0.1]}, "dynamic_lam"),
    ("plgu_grep", {"body_epochs": 2}, "body_epochs has no effect"),
    ("l2gd", {"participation": "sampled"}, "participation"),
    ("feddf", {"distil": {"patience": 5}}, "patience"),
    ("fedit", {"mean_of": "product", "server": {"kind": "adam"}}, "mean_of = product"),
    ("fedavg_ft", {"ft_epochs": 2, "ft_steps": 3}, "both ft_epochs and ft_steps"),
]


@pytest.mark.parametrize(("name", "options", "match"), OPTIONS)
def test_options_that_contradict_each_other_are_named(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_method(name, options)


@pytest.mark.parametrize("level", get_args(PrivacyLevel))
def test_methods_that_privacy_does_not_cover_are_named_in_its_page(level: PrivacyLevel) -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    refused = [method for method in map(make_method, sorted(methods())) if method.unprotected(level)]
    assert len(refused) > 5
    lacking = [m.title for m in refused if m.title.removesuffix(" trees").lower() not in page.lower()]
    assert not lacking


def of_task(task: str, y: torch.Tensor, outputs: int) -> Federation:
    source = BASE.source
    public = Source("public", source.x[:6], y[:6], task, outputs)  # type: ignore[arg-type]
    return replace(BASE, source=replace(source, y=y, task=task, outputs=outputs), public=public)


LABELS = BASE.source.y
BINARY = of_task("binary", LABELS % 2, 1)
REGRESSION = of_task("regression", LABELS[:, None].float(), 1)
COUNTS = of_task("counts", LABELS[:, None].float(), 1)

OF_CLASSES = ("fedas", "fedem", "fedgh", "fedphp", "fedproto", "fedtgp")
RUNS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("fedclup", {"batch_reuse": True}, {}, "local_steps"),
    ("fednova", {"mu": 0.1}, {"train": TRAIN}, r"train.momentum = 0.5 and mu = 0.1"),
    ("fedem", {}, {"train": replace(TRAIN, objective="balanced_softmax")}, r"train\.objective"),
    ("feddf", {}, {"data": WITHOUT_PUBLIC}, "public"),
    ("perada", {}, {"data": WITHOUT_PUBLIC}, "public"),
    ("perfed_ckt", {}, {"data": WITHOUT_PUBLIC}, "public"),
    ("perfed_ckt", {}, {"data": BINARY}, "binary"),
    ("feddf", {"distil": {"select": "best"}}, {}, "validation"),
    ("apple", {"downloads": 2}, NOISY, "the cores that a client requests"),
    ("knn_per", {}, {"data": COUNTS}, "kNN-Per.*counts"),
    ("qfedavg", {}, {"data": COUNTS}, "q-FedAvg.*counts"),
    ("knn_per", {"mix": "logits"}, {"data": REGRESSION}, "kNN-Per.*logits"),
    *((name, {}, {"data": REGRESSION}, f"{make(name).title}.*class") for name in OF_CLASSES),
]


@pytest.mark.parametrize(("name", "options", "settings", "match"), RUNS)
def test_runs_that_a_method_cannot_do_are_named(
    name: str, options: dict[str, Any], settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        simulation(make(name, **options), "logistic", **settings)


@pytest.mark.parametrize(
    ("name", "options", "settings", "match"),
    [
        ("flexlora", {"ranks": (3,)}, {}, "from 1 to that of the model's LoRA, 2"),
        ("flexlora", {"ranks": (2, 1)}, NOISY, "rank of a client's adapter"),
        ("hetlora", {"ranks": (2, 1)}, NOISY, "rank of a client's adapter"),
    ],
)
def test_ranks_that_cannot_be_or_must_stay_private_are_named(
    name: str, options: dict[str, Any], settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        simulation_with_lora(name, options=options, **settings)


OTHER_STEPS = ({"momentum": 0.9}, {"optimizer": "adamw"}, {"schedule": "linear"}, {"clip": 1.0})


@pytest.mark.parametrize("change", [*OTHER_STEPS, {"lr": 1.01 / (1 + L)}])
def test_training_without_a_number_of_steps_of_the_theory_is_named(change: dict[str, Any]) -> None:
    plain, sim = TrainConfig(steps=1, batch_size=0, lr=0.01), quadratic_simulation("fedclup")
    method = make_method("fedclup", {"lam": 1.0, **THEORY})
    Simulation(method, sim.federation, sim.model, plain)
    with pytest.raises(ConfigError, match=r"train|eta must be"):
        Simulation(method, sim.federation, sim.model, replace(plain, **change))


def test_a_step_of_l2gd_beyond_the_mean_is_refused() -> None:
    method = make_method("l2gd", {"lam": 4.0, "p": 0.5, "per_round": "coin"})
    quadratic_simulation(method, lr=0.25)
    with pytest.raises(ConfigError, match=r"1\.1.*0\.25"):
        quadratic_simulation(method, lr=0.275)


def layers(*parts: nn.Module) -> Model:
    return Model(lambda: nn.Sequential(nn.Flatten(), *copy.deepcopy(parts)))


def constant() -> nn.Module:
    layer = nn.Linear(64, CLASSES)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer


UNBIASED = layers(nn.Linear(64, 8), nn.Linear(8, CLASSES, bias=False))
FROZEN_HEAD = Model(lambda: copy.deepcopy(model("mlp").module), trainable=["fc1.*"])
PLAIN = layers(nn.Linear(64, 8), nn.Linear(8, CLASSES))
OF_TWO_WIDTHS = {"plain": model("mlp"), "normed": model("group_norm")}
OF_TWO_HEADS = {"plain": model("mlp"), "normed": UNBIASED}
OF_PARTS = ("fedper", "fedrep", "lg_fedavg")
KINDS = ("normed", "plain", "plain", "normed", "plain", "normed")


@pytest.mark.parametrize(
    ("name", "options", "models", "error", "match"),
    [
        ("fedproto", {}, OF_TWO_WIDTHS, ConfigError, "plain has 8, normed has 32"),
        ("fedgh", {}, OF_TWO_HEADS, ConfigError, "plain has one, normed has none"),
        ("fedproto", {"predict": "prototype"}, UNBIASED, ConfigError, "bias"),
        ("fedem", {}, layers(constant()), ConfigError, "start differently"),
        ("fedrod", {}, FROZEN_HEAD, ConfigError, "head is one trained linear layer"),
        ("fedcp", {}, FROZEN_HEAD, ConfigError, "FedCP.*frozen"),
        ("gpfl", {}, FROZEN_HEAD, ConfigError, "GPFL.*frozen"),
        ("fedlora", {"mean_of": "product"}, PLAIN, ConfigError, "the model trains none"),
        *((name, {"personal_part": "norm"}, PLAIN, ModelError, "norm") for name in OF_PARTS),
    ],
)
def test_models_that_do_not_fit_are_named(
    name: str, options: dict[str, Any], models: Any, error: type[TailorflError], match: str
) -> None:
    assigned = {"assignment": KINDS} if isinstance(models, dict) else {}
    with pytest.raises(error, match=match):
        Simulation(make(name, **options), BASE, models, TRAIN, **assigned)


@pytest.mark.parametrize(
    ("change", "network", "match"),
    [
        (add_condition, nn.Sequential(nn.Conv2d(1, 1, 1)), "is missing"),
        (add_condition, nn.Linear(2, 2), "inside a network"),
        (add_gate, nn.Linear(2, 2), "inside a network"),
        (add_offset, nn.Conv2d(1, 1, 1), "is missing"),
        (lambda network: project(network, 4), nn.Linear(3, 2), "linear head"),
        (lambda network: project(network, 4), nn.Sequential(nn.Conv2d(1, 2, 3)), "linear head"),
        (with_two_adapters, nn.Sequential(nn.Linear(2, 2)), "0 layers with LoRA"),
    ],
)
def test_networks_that_cannot_be_extended_are_named(change: Any, network: nn.Module, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        change(network)


class Named(nn.Module):
    """A network whose parts have the names of those that methods add to heads."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embeddings = nn.Parameter(torch.zeros(64))
        self.common = nn.ModuleDict({"common": nn.Linear(64, 6), "head": nn.Linear(6, CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.common["common"](x.flatten(1) + self.position_embeddings)
        return self.common["head"](features.tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fedcp", "gpfl"])
def test_networks_may_have_the_names_of_what_is_added(name: str) -> None:
    sim = Simulation(make(name), BASE, Model(Named), TRAIN)
    sim.step()
    ((_, models),) = sim.newcomer_models((5,), 0)
    assert set(models.keys()) == set(sim.model.parameters) | set(sim.model.buffers)


def test_what_compares_or_sums_samples_is_refused_under_sample_level_privacy() -> None:
    with pytest.raises(ModelError, match="compares the samples of a batch"):
        simulation(make("fedphp", teach="mmd"), train=PRIVATE).step()
    sim = simulation("local", train=PRIVATE)

    def information(client: Client, state: Any, received: Any) -> Any:
        return (client.fisher(received),)

    with pytest.raises(TailorflError, match="fisher"):
        sim.run((0,), sim.states.get((0,)), sim.init, information)
