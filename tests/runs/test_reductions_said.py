"""Lines whose settings make them another method say so: at the start, in the table, in the report, in a dry run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from methods.small import simulation
from runs.small import first_job, simulation_of
from tailorfl.core.method import make_method
from tailorfl.core.reduction import RunSetup
from tailorfl.report.document import write_report
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check, train_config
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.job import Job
from tailorfl.runs.reductions import named, remarks, setup_of
from tailorfl.settings.loading import expand, load, recipes
from tailorfl.settings.system import SystemConfig

SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 200},
    "model": "logistic",
    "methods": [
        "local",
        "ditto",
        {"name": "plgu_lf", "label": "frozen", "personal_layers": 5},
        {"name": "perada", "label": "PerAda w/o KD", "lam": 0.5, "distil": {"steps": 0}},
        {"name": "hypcluster", "label": "one cluster", "clusters": 1},
    ],
    "train": {"steps": 1, "batch_size": 8},
    "rounds": 2,
    "fraction": 0.5,
    "seeds": 2,
}
SAID = {
    "frozen": "PLGU-LF with D = 5 on a model of 1 layer is LocalTrain in its personal models",
    "PerAda w/o KD": "PerAda without distillation is Ditto (lam = 0.5)",
    "one cluster": "HypCluster with c = 1 is FedAvg",
}


@pytest.mark.slow
def test_a_run_says_it_once_a_line_and_its_table_and_report_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = run_experiment(load(SETTINGS), tmp_path / "out")
    warnings = [r.getMessage() for r in caplog.records if " is " in r.getMessage()]
    for label, sentence in SAID.items():
        assert warnings.count(f"{label}: {sentence}") == 1
    assert not any(w.startswith(("ditto:", "local:")) for w in warnings)
    assert result.reductions == {label: [sentence] for label, sentence in SAID.items()}
    table = (tmp_path / "out/comparison.md").read_text()
    pages = [table, *(page.read_text() for page in write_report(result))]
    for label, sentence in SAID.items():
        assert all(f"† {label}: {sentence}." in page for page in pages)
    assert "| frozen † |" in table
    assert "| Ditto |" in table
    assert "†" not in (tmp_path / "out/comparison.csv").read_text()


def test_a_dry_run_says_it_without_training() -> None:
    found = estimate(load(SETTINGS)).reductions
    assert found == {label: [sentence] for label, sentence in SAID.items()}


def test_a_fully_personal_split_says_that_every_client_trains_alone() -> None:
    methods = [{"name": "fedper", "personal_part": "all"}]
    sim = simulation_of(first_job(SETTINGS, model="mlp", methods=methods))
    assert named(sim, 2) == ["FedPer with all of this model in its personal part ('all') is LocalTrain"]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_needs_all_clients_is_not_said_where_some_may_be_absent(share: float) -> None:
    system = {"availability": {"kind": "share", "share": share}} if share < 1 else {}
    sim = simulation_of(first_job(SETTINGS, methods=["scaffold"], fraction=1.0, system=system))
    found = ["SCAFFOLD with one step a round of all clients, over whom the corrections cancel, is FedAvg"]
    assert [sentence.partition(" (")[0] for sentence in named(sim, 2)] == (found if share == 1 else [])


def test_the_largest_cohort_may_be_of_all_that_are_left() -> None:
    """Two of four are drawn, also where two of the four were left out."""
    data = {**SETTINGS["data"], "excluded_clients": ["client-0", "client-1"]}
    sim = simulation_of(first_job(SETTINGS, methods=["fedavg"], data=data))
    assert setup_of(sim, 1).cohort == max(len(sim.sample(number)) for number in range(20)) == 2


KNOWN: dict[tuple[str, ...], dict[str, str]] = {
    ("adapters_text",): {"FFA-LoRA": "fedavg", "PerAda w/o KD": "ditto"},
    ("all_methods",): {"PLGU-LF": "no layer stays personal", "FFA-LoRA": "fedavg"},
    ("ckt_cnn",): {"CKT c=1": "without clusters"},
    ("ckt_phases",): {
        f"CKT c=1 λ={line}": "without clusters"
        for line in ("0.02", "0.1", "0.5", "2", "8", "32", "0.1 one init", "0.5 after 20")
    },
    ("defaults_cifar",): {"fedclup": "mr_mtl", "cfl": "fedavg", "ffa_lora": "fedavg"},
    ("defaults_digits",): {"fedclup": "mr_mtl", "ffa_lora": "fedavg"},
    ("fedclup_cnn2",): {f"FedCLUP {lam}": "mr_mtl" for lam in ("0.2", "0.5", "2.5")},
    ("fedclup_cnn3",): {f"FedCLUP {lam}": "mr_mtl" for lam in ("0.1", "0.5", "1")},
    ("fedclup_logit", "mnist_logistic"): {f"FedCLUP {lam}": "mr_mtl" for lam in ("0.5", "1.5", "2.5")},
    ("fedoa_domains", "fedoa_flan", "fedoa_pacs"): {"PerAda": "ditto"},
    ("fedoa_clients",): {"PerAda λ=0": "local", "PerAda λ=0.1": "ditto"},
    ("fedoa_features", "fedoa_frozen_head"): {
        "PerAda λ=0": "local",
        **dict.fromkeys(("PerAda λ=0.1", "PerAda λ=1"), "ditto"),
    },
    ("heart_personal", "tcga_personal"): {"FedCLUP": "mr_mtl"},
    ("perada_cifar", "perada_distil", "perada_domains", "perada_dp", "perada_pacs"): {
        "PerAda w/o KD": "ditto"
    },
    ("perada_kd_gate",): {"PerAda w/o KD": ""},  # only its global model is trained and looked at
    ("perfed_ckt_cifar",): {"PerFed-CKT c=1": "without clusters"},
    ("plgu_ablation",): {"PLGU-LF D=0": "no layer stays personal"},
}
"""Lines of recipes that are other methods, and meant to be: each paper has this baseline in this form."""


@pytest.mark.parametrize("name", sorted(recipes()))
def test_no_line_of_a_recipe_is_another_method_unknown_to_us(name: str) -> None:
    """With a split that has both parts, whatever the model; rounds, cohorts and training are the recipe's."""
    recipe = load(name)
    check(recipe)
    found: dict[str, str] = {}
    split = cast(Any, SimpleNamespace(shared=("u",), personal=("v",), trainable=("u", "v")))
    for config in expand(recipe).values():
        clients = config.data.clients or 6
        for line in config.methods:
            job = Job(config, line, config.seeds[0])
            setup = RunSetup(
                split=split,
                layers=5,
                train=train_config(job),
                clients=clients,
                cohort=max(2, round(config.fraction * clients)),
                everyone=config.fraction == 1,
                rounds=job.rounds,
                architectures=len(config.model_of(line).architectures),
            )
            for reduction in make_method(line.name, line.options).reductions(setup):
                found[line.label] = reduction.other or reduction.remark
    known = next((known for names, known in KNOWN.items() if name in names), {})
    assert set(found) == set(known)
    assert {label: found[label] for label, words in known.items() if words not in found[label]} == {}


@pytest.mark.parametrize(("system", "everyone"), [({}, True), ({"dropout": 0.5}, False)])
def test_no_round_is_sure_to_have_everyone_where_clients_may_be_absent(
    system: dict[str, Any], everyone: bool
) -> None:
    """FedCLUP with all clients in every round is MR-MTL, whose mean also has those that were absent."""
    sim = simulation("fedclup", system=SystemConfig.model_validate(system))
    assert setup_of(sim, 2).everyone == everyone


@pytest.mark.parametrize("method", ["fedit", "fedlora"])
def test_methods_of_adapters_say_that_they_train_a_whole_model(method: str) -> None:
    def said(*settings: str) -> list[str]:
        config = load(None, [f"method={method}", "data.samples=120", "data.clients=2", *settings])
        return [s for s in remarks(simulation_of(first_job(config)), 3) if "all weights" in s]

    (sentence,) = said()
    assert "as FedAvg does" in sentence
    assert "model.lora" in sentence
    assert said("model.trainable=head") == []
