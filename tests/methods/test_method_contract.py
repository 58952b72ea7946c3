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
    "engines_agree": 4,
    "order_and_company_of_clients_do_not_matter": 5,
    "the_work_of_a_round_is_known_before_it": 3,
    "traffic_is_what_was_promised": 4,
    "models_that_come_out_are_complete_and_own_their_memory": 4,
    "no_training_changes_no_model": 4,
    "newcomers_without_steps_deploy_what_they_receive": 3,
    "losses_and_traffic_do_not_depend_on_the_engine": 8,
    "relabelling_clients_permutes_the_results": 6,
    "loading_forgets_what_was_before_and_copies": 5,
    "participation_all_trains_everyone_and_aggregates_the_sampled": 3,
    "the_runs_weights_are_those_of_a_method_that_has_none_of_its_own": 9,
    "evaluation_leaves_states_buffers_and_random_streams_unchanged": 6,
    "the_federation_and_the_initial_model_are_not_written_to": 6,
    "client_privacy_without_clip_and_noise_changes_nothing_or_is_refused": 7,
    "sample_privacy_without_clip_and_noise_changes_nothing": 6,
    "private_training_is_the_same_in_every_engine_and_again": 8,
    "clipped_training_moves_by_no_more_than_the_clip": 4,
    "batch_norm_is_refused_where_its_batches_would_leak": 3,
    "clients_that_are_not_sampled_stay_bit_identical": 5,
    "one_sampled_client_is_the_whole_average": 4,
    "reruns_are_bit_identical_and_seeds_matter": 5,
    "exported_networks_answer_as_personal_models_do": 3,
    "resumed_equals_uninterrupted": 4,
    "one_client_and_one_sample_run": 5,
    "the_data_of_others_does_not_matter_within_a_round": 4,
}
"""Check -> one of how many methods it runs on in the quick suite, the others being slow tests: for what holds of all
methods by one piece of code, a mistake in it shows in the few that stay.
"""
IN_TURN = {"engines_agree", "cohorts_may_be_cut_up", "order_and_company_of_clients_do_not_matter"} | {
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
            count = FUNCTIONS.count(check.function)
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
    """In the quick suite is one variant of each check, and one of three private trainings."""
    for k, (name, options) in enumerate(OTHERWISE):
        seen: dict[str, int] = {}
        promised = replace(row(name).contract(name), down=None, up=None, by_round=None, trained=None)
        for check in checks_of(replace(promised, method=make(name, **options))):
            if check.name in OF_OPTIONS and not (name in DRAWN and check.name.startswith("newcomers")):
                variant = seen[check.name] = seen.get(check.name, -1) + 1
                count = 3 if check.name.startswith("private") else FUNCTIONS.count(check.function)
                marks = [] if k % count == variant else [pytest.mark.slow]
                yield pytest.param(check, id=f"{check} {options}", marks=marks)


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
