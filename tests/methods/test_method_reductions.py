"""Settings under which one method is another one, under partial participation (matrix T01 to T04)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from methods.settings import make
from methods.small import assert_close, assert_same, everything, personal, shared, simulation

RUN: dict[str, Any] = {"rounds": 4, "fraction": 0.6}


def own_models(method: Any, model_name: str = "mlp", engine: str = "sequential") -> dict[str, Tensor]:
    return personal(simulation(method, model_name, engine, **RUN))


def global_of(method: Any, model_name: str = "mlp", engine: str = "sequential") -> dict[str, Tensor]:
    return shared(simulation(method, model_name, engine, **RUN))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
class TestFedAvgIs:
    """T01 and T02."""

    def test_fedprox_without_penalty(self, engine: str, model_name: str) -> None:
        assert_same(
            global_of(make("fedprox", mu=0.0), model_name, engine), global_of("fedavg", model_name, engine)
        )

    def test_the_global_model_of_fedavg_with_fine_tuning(self, engine: str, model_name: str) -> None:
        assert_same(global_of("fedavg_ft", model_name, engine), global_of("fedavg", model_name, engine))

    @pytest.mark.parametrize("lam", [0.0, 0.7])
    def test_the_global_model_of_ditto(self, engine: str, model_name: str, lam: float) -> None:
        """Up to rounding: Ditto averages θ − w and adds w, FedAvg averages θ."""
        uniform = make("fedavg", weights="uniform")
        assert_close(
            global_of(make("ditto", lam=lam), model_name, engine), global_of(uniform, model_name, engine)
        )

    @pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
    def test_the_global_model_of_apfl(self, engine: str, model_name: str, alpha: float) -> None:
        apfl, uniform = make("apfl", alpha=alpha), make("fedavg", weights="uniform")
        assert_close(global_of(apfl, model_name, engine), global_of(uniform, model_name, engine))

    @pytest.mark.parametrize("name", ["fedper", "lg_fedavg"])
    def test_a_split_method_with_nothing_personal(self, engine: str, model_name: str, name: str) -> None:
        split = make(name, personal_part="none", weights="samples")
        models, w = own_models(split, model_name, engine), global_of("fedavg", model_name, engine)
        assert_same({n: t[0] for n, t in models.items()}, w)
        assert all(torch.equal(t, t[:1].expand_as(t)) for t in models.values())


def test_fedbn_without_batch_norm_is_fedavg() -> None:
    """T04."""
    models = own_models("fedbn")
    assert_same({n: t[0] for n, t in models.items()}, global_of("fedavg"))


def test_fedrep_with_nothing_personal_and_no_head_epochs_is_fedavg() -> None:
    fedrep = make("fedrep", personal_part="none", head_epochs=0, body_epochs=1)
    assert_same({n: t[0] for n, t in own_models(fedrep).items()}, global_of("fedavg"))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
class TestLocalTrainIs:
    """T03."""

    def test_ditto_without_pull(self, engine: str, model_name: str) -> None:
        assert_same(
            own_models(make("ditto", lam=0.0), model_name, engine), own_models("local", model_name, engine)
        )

    def test_fedclup_without_pull(self, engine: str, model_name: str) -> None:
        assert_same(
            own_models(make("fedclup", lam=0.0), model_name, engine), own_models("local", model_name, engine)
        )

    @pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedbn"])
    def test_a_split_method_with_nothing_shared(self, engine: str, model_name: str, name: str) -> None:
        sim = simulation(make(name, personal_part="all"), model_name, engine, **RUN)
        assert_same(personal(sim), own_models("local", model_name, engine))
        assert (sim.traffic.up, sim.traffic.down_unicast, sim.traffic.bytes_up) == (0, 0, 0)

    def test_the_local_model_of_apfl_with_alpha_one(self, engine: str, model_name: str) -> None:
        """The model v; the step goes through APFL's own direction, so up to rounding.

        The mixture is v itself at α = 1.
        """
        apfl = make("apfl", alpha=1.0, adaptive=False)
        assert_close(own_models(apfl, model_name, engine), own_models("local", model_name, engine))


def test_fedrep_with_nothing_shared_trains_the_head_epochs_alone() -> None:
    local = own_models("local")
    assert_same(own_models(make("fedrep", personal_part="all", head_epochs=1, body_epochs=1)), local)


def test_centralized_on_one_client_is_fedavg_and_local_training() -> None:
    from methods.small import federation

    one = federation((11,))
    runs = {
        name: simulation(name, rounds=3, data=one) for name in ("centralized", "fedavg", "local", "ditto")
    }
    w = shared(runs["centralized"])
    assert_same(w, shared(runs["fedavg"]))
    assert_same(w, {n: t[0] for n, t in personal(runs["local"]).items()})
    assert_close(w, shared(runs["ditto"]))


def test_identical_clients_are_one_client() -> None:
    """Full batches, so that the order of samples, which differs by client id, plays no part."""
    from dataclasses import replace

    from methods.small import TRAIN, federation
    from tailorfl.data.federation import Federation

    base = federation((9,))
    same = Federation(
        base.source, base.train[:1] * 3, base.val[:1] * 3, base.test[:1] * 3, ("a", "b", "c"), 3
    )
    full = replace(TRAIN, batch_size=0, epochs=3)
    for name in ("fedavg", "fedclup", "ditto", "fedrep", "pfedme"):
        one, three = (simulation(name, rounds=3, data=data, train=full) for data in (base, same))
        alone = {n: t[:1] for n, t in personal(one, (0,)).items()}
        for i in range(3):
            assert_close(alone, {n: t[i : i + 1] for n, t in personal(three).items()})


def test_apfl_with_alpha_zero_keeps_v_and_deploys_the_local_copy_of_fedavg() -> None:
    from methods.small import TRAIN
    from tailorfl.core import tree

    apfl = simulation(make("apfl", alpha=0.0, adaptive=False), train=_plain(TRAIN), fraction=0.6)
    fedavg = simulation(make("fedavg", weights="uniform"), train=_plain(TRAIN), fraction=0.6)
    for _ in range(3):
        ids = apfl.sample(apfl.round)
        w = fedavg.server["w"]
        (theta,) = fedavg.run(ids, fedavg.states.get(ids), w, lambda c, s, r: (c.fit(r),))
        apfl.step()
        fedavg.step()
        assert_close(personal(apfl, ids), dict(theta.items()))
    start = {p: t.expand(5, *t.shape) for p, t in tree.leaves(apfl.init)}
    assert_same({p.removeprefix("client/v/"): t for p, t in everything(apfl).items() if "/v/" in p}, start)


def _plain(train: Any) -> Any:
    """Without momentum and weight decay: decay would shrink even a v whose gradient is zero."""
    from dataclasses import replace

    return replace(train, momentum=0.0, weight_decay=0.0)
