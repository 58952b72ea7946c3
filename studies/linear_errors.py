"""How far personal models are from the truth, where the truth is known: linear regression with drawn weights.

    optimisation  ‖v_i^t − ṽ_i‖²    ṽ the optimum of the coupled problem Σ p_i (F_i(v_i) + (λ/2)‖v_i − w‖²), closed form
    statistical   ‖ṽ_i − v_i*‖²     v_i* the weights that client i's data were drawn with
    total         ‖v_i^t − v_i*‖²

(FedCLUP, ICML 2025.) The first falls with rounds, the second does not: it is what λ and the samples leave. Both are
about a method that solves the coupled problem, as FedCLUP and MR-MTL do; the total error is any method's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.synthetic import closed_form, local_quadratics
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import Weights


@dataclass(frozen=True)
class Truth:
    """The training clients' problems and true weights, float64."""

    H: Tensor
    """[clients, dim, dim] curvature of the loss on a client's training part."""
    c: Tensor
    """[clients, dim] its minimiser."""
    p: Tensor
    """[clients] weights of the coupled problem, summing to 1."""
    weights: Tensor
    """[clients, dim] v_i*."""

    @classmethod
    def of(cls, federation: Federation, weighting: Weights = "uniform") -> Truth:
        """Return the truth of a federation of linear regressions, each client one of the source's groups.

        Raises:
            ConfigError: the source holds no true weights, or clients mix samples of several.
        """
        source, n = federation.source, federation.num_clients
        weights = source.info.get("weights")
        if weights is None or "client" not in source.groups:
            raise ConfigError(
                f"errors against the truth need a source that knows it, such as synthetic_linear, not '{source.name}'"
            )
        owners = [
            torch.unique(source.groups["client"][torch.from_numpy(rows)]) for rows in federation.train[:n]
        ]
        if any(len(owner) != 1 for owner in owners):
            raise ConfigError(
                "errors against the truth need every client's samples to come from one true model; use the "
                "natural partition"
            )
        problems = [
            local_quadratics(source.x[rows][None], source.y[rows].reshape(1, -1))
            for rows in map(torch.from_numpy, federation.train[:n])
        ]
        sizes = torch.from_numpy(federation.sizes()[:n]).double()
        share = sizes / sizes.sum() if weighting == "samples" else torch.full_like(sizes, 1 / n)
        H, c = (torch.cat(parts) for parts in zip(*problems, strict=True))
        return cls(H, c, share, weights[torch.cat(owners)])

    def errors(self, models: Tensor, lam: float) -> dict[str, Tensor]:
        """Return the squared distances of personal models [clients, dim] by measure, each [clients] float64."""
        _, optimum = closed_form(self.H, self.c, self.p, lam)
        v = models.double()
        return {
            "total": _square(v - self.weights),
            "optimisation": _square(v - optimum),
            "statistical": _square(optimum - self.weights),
        }


def linear_models(sim: Simulation, dim: int) -> Tensor:
    """Return the deployable models of the training clients as vectors, [clients, dim].

    Raises:
        ConfigError: the model has other parameters than `dim` weights.
    """
    names = tuple(sim.model.parameters)
    if len(names) != 1 or sim.model.scalars != dim:
        raise ConfigError(
            f"errors against the truth need a linear model of {dim} weights without bias, but the model has "
            f"{sim.model.scalars} in {', '.join(names)}"
        )
    parts = [models.get(names[0]) for _, models in sim.personal_models(range(sim.federation.num_clients))]
    return torch.cat([part.reshape(len(part), -1) for part in parts])


def _square(difference: Tensor) -> Tensor:
    return difference.square().sum(1)
