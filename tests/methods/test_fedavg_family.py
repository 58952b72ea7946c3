"""FedAvg, its server optimizers, FedProx and FedAvg+FT against plain loops and numpy."""

from __future__ import annotations

import torch

from methods.reductions import Same, fedavg, in_run, nothing_personal
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, make
from methods.small import NEWCOMER, assert_close, assert_same, personal, shared, simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "fedavg": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(
            Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
            in_run(Same("visits", {}, "cyclic"), sampling="cyclic", fraction=1.0),
            in_run(Same("visits", {}, "cyclic", {"order": "fixed"}), sampling="cyclic_fixed", fraction=1.0),
        ),
        proved="everything else is compared with it; test_fedavg_family.py and docs/test_fedavg_from_scratch.py",
    ),
    "fedprox": Row(
        Card(whole, whole, whole, False, True),
        {"mu": 0.5},
        Limit("coupled_global", PROX_STEPS, {"mu": LAM}),
        same=(
            fedavg("T01", mu=0.0, said=True),
            Same(
                "one step", {"mu": 0.5}, "fedavg", exact=False, said=True, train={"steps": 1, "epochs": None}
            ),
            Same(
                "one step",
                {"mu": 0.5},
                "fedavg",
                exact=False,
                said=True,
                train={"batch_size": 0, "epochs": 1},
            ),
        ),
    ),
    "fedavg_ft": Row(
        Card(whole, whole, whole, True, True),
        # 60 tuning epochs of one full batch each reach the client's own optimum.
        limit=Limit("pooled_and_local", 1, {"ft_epochs": 60}),
        same=(
            fedavg("T01", ft_epochs=3),
            nothing_personal("T01", ft_epochs=0),
            fedavg("T01", ft_epochs=0, said=True),
        ),
    ),
}


def test_one_full_batch_step_of_all_clients_is_one_step_on_the_pooled_data() -> None:
    from dataclasses import replace

    from methods.small import TRAIN

    gd = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0)
    fedavg, pooled = (simulation(name, train=gd, rounds=5) for name in ("fedavg", "centralized"))
    assert_close(shared(fedavg), shared(pooled))


def test_buffers_become_the_average_whatever_the_server_optimizer() -> None:
    """Running variances must never be driven below 0 by momentum."""
    fancy = simulation(
        make("fedavg", server={"kind": "sgd", "lr": 1.7, "momentum": 0.9}), "batch_norm", rounds=1
    )
    simple = simulation("fedavg", "batch_norm", rounds=1)
    assert_same(
        {b: shared(fancy)[b] for b in fancy.model.buffers},
        {b: shared(simple)[b] for b in fancy.model.buffers},
    )
    for name in fancy.model.parameters:
        moved = shared(simple)[name] - simple.init[name]
        torch.testing.assert_close(shared(fancy)[name], simple.init[name] + 1.7 * moved, atol=1e-6, rtol=1e-5)


class TestFineTuning:
    def test_tuning_the_head_leaves_the_body_and_its_statistics(self) -> None:
        sim = simulation(make("fedavg_ft", ft_epochs=3, ft_scope="head"), "batch_norm", rounds=1)
        tuned, w = personal(sim, (0, NEWCOMER)), shared(sim)
        head = ("8.weight", "8.bias")
        for n, t in tuned.items():
            assert torch.equal(t, w[n].expand_as(t)) == (n not in head), n
