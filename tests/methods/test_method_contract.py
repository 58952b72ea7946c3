"""Every registered method keeps the contract of `tailorfl.testing`, each check a test of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from methods.settings import NAMES, ROWS, make, row
from methods.small import FACTORIES, fits, model
from tailorfl.core.method import methods
from tailorfl.testing import Check, checks_of

SHARES = {
    "cohorts_may_be_cut_up": 12,  # on models of all kinds in tests/engines/test_engines_agree.py
    "losses_and_traffic_do_not_depend_on_the_engine": 3,
    "relabelling_clients_permutes_the_results": 2,
    "loading_forgets_what_was_before_and_copies": 2,
    "participation_all_trains_everyone_and_aggregates_the_sampled": 3,
    "the_runs_weights_are_those_of_a_method_that_has_none_of_its_own": 3,
    "evaluation_leaves_states_buffers_and_random_streams_unchanged": 2,
    "the_federation_and_the_initial_model_are_not_written_to": 3,
    "client_privacy_without_clip_and_noise_changes_nothing_or_is_refused": 3,
    "sample_privacy_without_clip_and_noise_changes_nothing": 2,
    "private_training_is_the_same_in_every_engine_and_again": 3,
    "clipped_training_moves_by_no_more_than_the_clip": 2,
    "batch_norm_is_refused_where_its_batches_would_leak": 3,
    "clients_that_are_not_sampled_stay_bit_identical": 3,
    "one_sampled_client_is_the_whole_average": 2,
    "reruns_are_bit_identical_and_seeds_matter": 2,
    "exported_networks_answer_as_personal_models_do": 3,
    "resumed_equals_uninterrupted": 2,
    "one_client_and_one_sample_run": 2,
    "the_data_of_others_does_not_matter_within_a_round": 2,
}
"""Check -> one of how many methods it runs on in the quick suite, the others being slow tests: for what holds of all
methods by one piece of code, a mistake in it shows in the few that stay.
"""
IN_TURN = {"engines_agree", "order_and_company_of_clients_do_not_matter"} | {
    "the_data_of_others_does_not_matter_within_a_round",
    "resumed_equals_uninterrupted",
    "one_client_and_one_sample_run",
    "models_that_come_out_are_complete_and_own_their_memory",
}
"""Checks with several variants of which a method runs one in the quick suite, in turn."""


def every_check() -> Iterator[Any]:
    for k, name in enumerate(NAMES):
        seen: dict[str, int] = {}
        for check in checks_of(row(name).contract(name)):
            variant = seen[check.name] = seen.get(check.name, -1) + 1
            count = sum(other is check.function for other in FUNCTIONS)
            share = SHARES.get(check.name, 1)
            quick = k % share == len(check.name) % share
            if check.name in IN_TURN:
                quick = quick and k // share % count == variant
            yield pytest.param(check, id=str(check), marks=[] if quick else [pytest.mark.slow])


OTHERWISE: list[tuple[str, dict[str, Any]]] = [
    ("apple", {"downloads": 2}),
    ("ditto", {"dynamic_lam": (0.0, 2.0), "dynamic_every": "step"}),
    ("fedala", {"start": 0.5}),
    ("fedavg", {"server": {"kind": "adam", "lr": 0.1, "eps": 0.1}}),
    ("fedclup", {"schedule": {"kind": "dynamic", "values": [0, 0.3, 2.0], "patience": 1, "tol": 1e9}}),
    ("feddpa", {"when": "after", "ft_epochs": 1}),
    ("fedfomo", {"downloads": 2, "fallback": "baseline"}),
    ("l2gd", {"coin_seed": 1}),  # 0, 0, 1: the second round is one between sending models and averaging them
    ("l2gd", {"per_round": "exchange"}),
    ("moon", {"projection": 5, "history": 2}),
    ("per_fedavg", {"variant": "HF", "delta": 0.3}),
    ("perfed_ckt", {"warm_rounds": 1, "first_round": "upload"}),
    ("plgu_lf", {"eps_from": "global", "personal_layers": 1}),
]
"""Options under which a method keeps or sends something else than with those of its row."""
OF_OPTIONS = {
    "engines_agree",
    "newcomers_without_steps_deploy_what_they_receive",
    "resumed_equals_uninterrupted",
    "private_training_is_the_same_in_every_engine_and_again",
}


DRAWN = {"apple", "l2gd"}
"""Methods whose newcomers get, with these options, what a draw for the client or the round says."""


def checks_of_options() -> Iterator[Any]:
    for name, options in OTHERWISE:
        promised = replace(row(name).contract(name), down=None, up=None, by_round=None, trained=None)
        for check in checks_of(replace(promised, method=make(name, **options))):
            if check.name in OF_OPTIONS and not (name in DRAWN and check.name.startswith("newcomers")):
                yield pytest.param(check, id=f"{check} {options}")


FUNCTIONS: list[Callable[..., None]] = [
    check.function for check in checks_of(row("fedavg").contract("fedavg"))
]


@pytest.mark.parametrize("check", [*every_check(), *checks_of_options()])
def test_every_method_keeps_its_contract(check: Check) -> None:
    check()


def test_every_registered_method_has_a_row_and_every_row_a_method() -> None:
    assert not sorted(set(ROWS) ^ set(methods())), "methods without a row, or rows without a method"


def test_models_of_the_matrix_cover_what_engines_treat_apart() -> None:
    assert model("batch_norm").has_batch_statistics
    assert not model("group_norm").has_batch_statistics
    assert {"logistic", "mlp", "cnn2", "batch_norm", "group_norm", "dropout"} <= set(FACTORIES)
    assert not fits("lg_fedavg", "logistic")
