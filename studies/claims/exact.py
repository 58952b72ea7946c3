"""Claims that are computed and not measured: costs, formulas, and what a paper's own printed numbers say together.

Each is a function without arguments that says whether the claim is true; the tests named beside the claims hold
the parts to independent computations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

PRINTED_COSTS = {
    # (method, clusters): 10⁷ scalars with 10 and with 15 of 100 clients a round, as printed
    ("fedavg", 1): (2150, 3120),
    ("fedfomo", 1): (3900, 5850),
    ("hypcluster", 2): (2340, 3320),
    ("hypcluster", 3): (2540, 3510),
    ("hypcluster", 5): (2930, 3900),
    ("hypcluster", 6): (3120, 4100),
    ("perfed_ckt", 1): (4.4, 6.4),
    ("perfed_ckt", 2): (4.8, 6.8),
    ("perfed_ckt", 3): (5.2, 7.2),
    ("perfed_ckt", 4): (5.6, 7.6),
}
CKT_ROUNDS = 200
"""With which the printed costs fit; the paper's text has 500."""
PLGU_GLOBAL = {
    # set: FedAvg, FedSAM, Ditto, pFedMe, PLGU-LF of the global model, mean accuracy in percent, table 1
    "CIFAR-10, 10": (64.79, 67.57, 64.15, 64.36, 69.36),
    "CIFAR-10, 100": (67.15, 69.49, 68.24, 68.31, 71.48),
    "CIFAR-100, 10": (55.86, 57.19, 56.35, 55.17, 59.74),
    "CIFAR-100, 100": (58.00, 59.39, 58.93, 57.24, 61.07),
    "Tiny-ImageNet, 20": (37.78, 38.42, 38.09, 36.43, 40.61),
}
PERADA_DP = {0.8: 5.99, 1.0: 3.7, 1.5: 1.81}
"""Noise -> printed ε, table 4."""
FEDCLUP = {
    # (set, classes a client): FedCLUP high, medium, low; Global; Local, as printed in the appendix
    ("logistic", 2): (0.5001, 0.6011, 0.6109, 0.7001, 0.3214),
    ("logistic", 6): (0.6813, 0.7001, 0.7241, 0.7718, 0.6000),
    ("logistic", 10): (0.8123, 0.8213, 0.8312, 0.8391, 0.7828),
    ("CNN2", 2): (0.3567, 0.4721, 0.6019, 0.6123, 0.3019),
    ("CNN2", 6): (0.7001, 0.7833, 0.7843, 0.8092, 0.6231),
    ("CNN2", 10): (0.8753, 0.8893, 0.9032, 0.9098, 0.8194),
    ("CNN5", 2): (0.8891, 0.9000, 0.9333, 0.9377, 0.6536),
    ("CNN5", 6): (0.8451, 0.8941, 0.9392, 0.9446, 0.7333),
    ("CNN5", 10): (0.9091, 0.9102, 0.9421, 0.9433, 0.7633),
    ("EMNIST", 30): (0.6084, 0.6089, 0.6011, 0.6102, 0.5583),
    ("EMNIST", 40): (0.6097, 0.6123, 0.6357, 0.6423, 0.5644),
    ("EMNIST", 47): (0.6278, 0.6415, 0.6672, 0.6611, 0.6111),
    ("CIFAR-10", 2): (0.6101, 0.6292, 0.6340, 0.6444, 0.5801),
    ("CIFAR-10", 6): (0.6211, 0.6311, 0.6712, 0.6949, 0.5623),
    ("CIFAR-10", 10): (0.6102, 0.6712, 0.7302, 0.8041, 0.6238),
}


def perada_scalars() -> bool:
    """PerAda trains 2 · 1.41 M and sends 1.41 M of a ResNet-18 of 11.18 M: 12.6 %."""
    from tailorfl.models.registry import build
    from tailorfl.models.selectors import select

    net = build("resnet18", (3, 32, 32), 10, adapters=True)
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    sent = sum(sizes.get(name, 0) for name in select(net, "adapter+head"))
    plain = sum(p.numel() for p in build("resnet18", (3, 32, 32), 10).parameters())
    return (round(sent / 1e6, 2), round(plain / 1e6, 2), round(100 * sent / plain, 1)) == (1.41, 11.18, 12.6)


def perada_epsilon() -> bool:
    """Table 4's ε covers both trainings of a client: 10 rounds of an epoch, 2,250 samples, batches of 64, δ = 1e-5."""
    from tailorfl.privacy import epsilon
    from tailorfl.theory.privacy import releases

    entries = {noise: releases(2250, 64, 1, 10, trainings=2, noise=noise) for noise in PERADA_DP}
    return all(epsilon([entry], 1e-5, "rdp") <= 1.02 * PERADA_DP[noise] for noise, entry in entries.items())


def perada_corrupted_gain() -> bool:
    """PerAda's gain on CIFAR-10-C over the best baseline of table 1, Ditto, is the abstract's 5.23."""
    return math.isclose(48.53 - 44.32, 5.23, abs_tol=0.005)


def plgu_least_gain() -> bool:
    """PLGU-LF's global model is at least 2.55 points above every baseline on all sets, as the text has it."""
    return all(lf - max(others) >= 2.545 for *others, lf in PLGU_GLOBAL.values())


def plgu_gradients() -> bool:
    """PLGU-LF computes no more gradients a client and round than Ditto or pFedMe with 3 inner steps."""
    methods = (
        {"name": "plgu_lf", "personal_layers": 1},
        {"name": "ditto", "label": "ditto"},
        {"name": "pfedme", "inner_steps": 3},
    )
    lf, *others = (_gradients(method) for method in methods)
    return all(lf <= other for other in others)


def ckt_costs() -> bool:
    """Every printed cost, with 200 rounds and each distinct payload of a round's downlink counted once."""
    from studies.perfed_ckt_formulas import transmission_cost

    return all(
        math.isclose(float(f"{transmission_cost(name, m, CKT_ROUNDS, clusters).total / 1e7:.3g}"), cost)
        for (name, clusters), printed in PRINTED_COSTS.items()
        for m, cost in zip((10, 15), printed, strict=True)
    )


def ckt_costs_in_500_rounds() -> bool:
    """Return the same with the 500 rounds of the text."""
    from studies.perfed_ckt_formulas import transmission_cost

    return math.isclose(float(f"{transmission_cost('perfed_ckt', 10, 500, 3).total / 1e7:.3g}"), 5.2)


def ckt_optimum() -> bool:
    """Theorem 4.2: at λ* and α* no change of either lowers a client's expected error."""
    from studies.perfed_ckt_formulas import transfer_mse
    from tailorfl.theory.perfed_ckt import best_transfer

    beta, sigma2, nu, v2 = 3.0, 2.0, 1.7, (0.5, 1.0, 2.0, 4.0, 0.2)
    best, rng = best_transfer(beta, sigma2, nu, v2), np.random.default_rng(0)
    for client, _ in itertools.product(range(len(v2)), range(200)):
        moved = best.alpha + (step := rng.normal(0, 0.05, len(v2))) - step.mean()
        lam = float(best.lam[client] * np.exp(rng.normal(0, 0.3)))
        found = transfer_mse(beta, sigma2, nu, v2, client, lam, moved)
        if found < best.mse[client] - 1e-12:
            return False
    return True


def ckt_normaliser() -> bool:
    """Theorem 4.2's B_k as printed makes the weights α sum to 1."""
    beta, sigma2, v2 = 3.0, 2.0, np.array([0.5, 1.0, 2.0, 4.0, 0.2])
    noise = sigma2 + beta * v2
    others = 1 / ((1 / noise).sum() - 1 / noise)
    printed = others * noise / (sigma2 + others * beta * v2)
    return bool(np.allclose(printed * (1 / noise).sum(), 1))


def ckt_gradient_vanishes() -> bool:
    """Theorem 4.1: with fixed centroids and rates (1 + t/20)^-0.75 gradients vanish.

    The squares of the rates have a finite sum, and the mean squared gradient weighted by the rates falls as their
    sum grows: by 10^-0.25 = 0.56 for ten times as many steps.
    """
    from studies.perfed_ckt_formulas import example, squared_norms

    for seed in range(3):
        rates, norms = squared_norms(example(seed), 2000, lambda t: (1 + t / 20) ** -0.75, seed=seed)
        means = [float((rates[:t] * norms[:t]).sum() / rates[:t].sum()) for t in (20, 200, 2000)]
        if any(later > 0.62 * earlier for earlier, later in itertools.pairwise(means)):
            return False
    return True


def fedclup_rate() -> bool:
    """Theorem 2: on quadratics the squared error contracts at least as fast as predicted, for every λ and κ tried."""
    from tailorfl.theory.fedclup import schedule

    rng = np.random.default_rng(0)
    for kappa, lam, _ in itertools.product((2.0, 16.0, 256.0), (0.01, 1.0, 100.0), range(20)):
        curvature = np.exp(rng.uniform(0, math.log(kappa), (10, 3)))  # of 10 clients along 3 axes
        plan = schedule(1.0, kappa, lam)
        pulled = (lam * curvature / (lam + curvature)).mean(0)  # the curvature of the mean of the envelopes
        if ((1 - plan.gamma * pulled) ** 2).max() > plan.rate + 1e-12:
            return False
    return True


def fedclup_gradients() -> bool:
    """Corollary 2: the gradients until a reduction stay within a factor of 3 while λ goes from 0.01 to 100 times L."""
    from tailorfl.theory.fedclup import schedule

    found = [schedule(1.0, 100.0, lam).gradients(1e-6) for lam in (1.0, 10.0, 100.0, 1e3, 1e4)]
    return max(found) <= 3 * min(found)


def fedclup_slopes() -> bool:
    """Corollary 1: with its λ the error of linear regression falls as 1/N where R = 0.

    It falls as 1/n where R is large, grows as R² between 1/√N and 1/√n and not with R beyond; slopes of logarithms
    within 0.15.
    """
    where: dict[float, tuple[dict[float, tuple[int, int, float]], ...]] = {
        -1.0: (
            {clients: (clients, 50, 0.0) for clients in (5, 10, 20, 40)},
            {samples: (20, samples, 1.0) for samples in (25, 50, 100, 200)},
        ),
        2.0: ({radius: (200, 40, radius) for radius in (0.08, 0.1, 0.12, 0.15)},),
        0.0: ({radius: (20, 20, radius) for radius in (4.0, 8.0, 16.0)},),
    }
    return all(abs(_slope(line) - expected) < 0.15 for expected, lines in where.items() for line in lines)


def fedclup_rows_rise() -> bool:
    """Of the 15 printed rows all rise from high personalization to low, and on to Global."""
    return all(high <= medium <= low <= pooled for high, medium, low, pooled, _ in FEDCLUP.values())


def fedclup_local_is_last() -> bool:
    """In all 15 printed rows Local is below FedCLUP and Global."""
    return all(local < min(rest) for *rest, local in FEDCLUP.values())


def fedclup_more_classes_help() -> bool:
    """In each printed column of a set, more classes a client are better."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for (name, _), row in FEDCLUP.items():
        rows.setdefault(name, []).append(row)
    return all(bool((np.diff(np.array(some), axis=0) > 0).all()) for some in rows.values())


def fedoa_lambda_of_its_table() -> bool:
    """Return the ablation's ROUGE-1 at λ = 0.5 (67.61) is that of the main table, which has λ = 0.5 (67.96)."""
    return math.isclose(67.61, 67.96, abs_tol=0.005)


CHECKS: Mapping[str, Callable[[], bool]] = {
    check.__name__: check
    for check in (
        perada_scalars,
        perada_epsilon,
        perada_corrupted_gain,
        plgu_least_gain,
        plgu_gradients,
        ckt_costs,
        ckt_costs_in_500_rounds,
        ckt_optimum,
        ckt_normaliser,
        ckt_gradient_vanishes,
        fedclup_rate,
        fedclup_gradients,
        fedclup_slopes,
        fedclup_rows_rise,
        fedclup_local_is_last,
        fedclup_more_classes_help,
        fedoa_lambda_of_its_table,
    )
}
"""By the name that claims have."""


def _slope(points: Mapping[float, tuple[int, int, float]]) -> float:
    """Of the logarithm of the mean error over that of what the points vary; few clients are drawn more often."""
    found = [
        np.mean([_error(*point, seed) for seed in range(max(8, 600 // point[0]))])
        for point in points.values()
    ]
    return float(np.polyfit(np.log(list(points)), np.log(found), 1)[0])


def _error(clients: int, samples: int, radius: float, seed: int) -> float:
    """Mean squared distance of the clients' models at FedCLUP's optimum to their true weights.

    λ is that of corollary 1; there are three standard normal inputs, noise of deviation 1, truths at
    distance `radius` from their centre.
    """
    import torch

    from tailorfl.data.synthetic import closed_form
    from tailorfl.theory.fedclup_statistics import Problem, lambda_range

    rng, dim = np.random.default_rng(seed), 3
    away = rng.standard_normal((clients, dim))
    truth = rng.standard_normal(dim) + radius * away / np.linalg.norm(away, axis=1, keepdims=True)
    x = rng.standard_normal((clients, samples, dim))
    y = np.einsum("ksd,kd->ks", x, truth) + rng.standard_normal((clients, samples))
    curvature = np.einsum("ksd,kse->kde", x, x) / samples
    alone = np.linalg.solve(curvature, np.einsum("ksd,ks->kd", x, y)[..., None] / samples)[..., 0]
    span = lambda_range(Problem(1.0, 1.0, math.sqrt(dim), radius, samples, clients))
    equal = torch.full((clients,), 1 / clients, dtype=torch.float64)
    lam = span.lower if span.together else span.upper
    _, found = closed_form(torch.from_numpy(curvature), torch.from_numpy(alone), equal, lam)
    return float(((found.numpy() - truth) ** 2).sum(1).mean())


def _gradients(method: Mapping[str, object]) -> float:
    """Gradients of single samples that a client computes in a round, counted in one round of four clients."""
    from tailorfl.runs.build import make_federation, make_simulation
    from tailorfl.runs.job import Job
    from tailorfl.settings.loading import load

    config = load(
        {
            "data": {"clients": 4, "samples": 200, "partition": "iid"},
            "model": {"name": "mlp", "hidden": [8]},
            "methods": [dict(method)],
            "rounds": 1,
        }
    )
    sim = make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0))
    sim.step()
    return sim.gradients / sim.turns
