"""Deployed clients compute in the precision of the experiment, or the deployment is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.federating import deployed, experiment, private_state, same, server_state, simulated
from tailorfl.deploy.serving import for_deployment
from tailorfl.engines.devices import HOST, available
from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree


@pytest.mark.parametrize(("name", "why"), [("auto", "would not compute alike"), ("tf32", "is for GPUs")])
def test_what_clients_could_not_do_alike_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.precision={name} .*{why}"):
        for_deployment(ExperimentConfig.model_validate({"engine": {"precision": name}}))


@pytest.mark.slow
@pytest.mark.skipif("bfloat16" not in available(HOST), reason="needs a processor that multiplies bfloat16")
def test_deployed_clients_compute_in_bfloat16_as_the_simulation(tmp_path: Path) -> None:
    config = experiment("ditto", engine={"name": "sequential", "precision": "bfloat16"})
    result, sim = deployed(config, tmp_path), simulated(config)
    same(server_state(result), dict(tree.leaves(sim.server)))
    for client in range(4):
        own = {p: t[0] for p, t in tree.leaves(sim.states.get((client,)))}
        same(private_state(tmp_path, config, client), own)
