"""PerFed-CKT on linear regression, where everything is known: Theorem 4.2 simulated, and the toy of figure 1.

    python -m studies.perfed_ckt_theory            # writes results/perfed_ckt_theory

Theorem 4.2 (arXiv 2109.08119): how far should client k be pulled (λ) towards which mix (α) of everybody's
estimates? Models and labels are drawn, every client is fitted by least squares and by the pulled objective with
real matrices X and P, and its squared error is compared with the calculator's, over sweeps of λ and of α.

The toy: three clients with models θ + ζ_k, θ ~ U(−10, 10)², ζ_k ~ N(0, σ_k² I), σ = (2, 5, 200), inputs from
[−10, 10]², λ = 50. Predictions are those of a linear model, s(w, x) = xᵀw, so that the pulled objective
‖y − X w‖² + λ ‖P w − s̄‖² has a closed form. The registered method `perfed_ckt` predicts class probabilities (a
softmax) and is not what runs here; its k-means is.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from studies.perfed_ckt_formulas import transfer_mse
from tailorfl.methods.perfed_ckt import cluster
from tailorfl.report.plots import COLOURS
from tailorfl.theory.perfed_ckt import best_transfer

Floats = NDArray[np.float64]

BETA, SIGMA2, NU, V2 = 3.0, 2.0, 1.7, np.array([0.5, 1.0, 2.0, 4.0, 0.2])
FACTORS = 2.0 ** np.arange(-4, 5)
"""λ as multiples of λ_k*."""
POWERS = np.arange(-1.0, 3.01, 0.5)
"""α_i proportional to (σ² + β v_i²)^−p; p = 1 is the theorem's, p = 0 the plain mean."""
DIM = 2

SPREAD, LAM, SAMPLES, PUBLIC = np.array([2.0, 5.0, 200.0]), 50.0, 20, 20
NOISES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Standard deviations of the labels."""
STEPS, ROUNDS = 400, 5
"""Gradient steps a round, and rounds with new centroids."""


# -- Theorem 4.2 --------------------------------------------------------------------------------------------


def theorem(trials: int, rng: np.random.Generator) -> pd.DataFrame:
    """Return a row for every sweep, client and setting: the predicted and the simulated error of one coordinate.

    Every setting has trials of its own, so that the deviations from the predictions are independent.
    """
    clients = len(V2)
    X = np.sqrt(BETA) * np.linalg.qr(rng.standard_normal((4, DIM)))[0]
    P = np.sqrt(NU) * np.linalg.qr(rng.standard_normal((3, DIM)))[0]

    def row(sweep: str, k: int, value: float, lam: float, alpha: Floats) -> dict[str, Any]:
        true = rng.uniform(-10, 10, (trials, 1, DIM))
        true = true + np.sqrt(V2)[:, None] * rng.standard_normal((trials, clients, DIM))
        y = true @ X.T + np.sqrt(SIGMA2) * rng.standard_normal((trials, clients, 4))
        estimates = y @ X @ np.linalg.inv(X.T @ X)
        right = estimates[:, k] @ X.T @ X + lam * np.einsum("i,tid->td", alpha, estimates) @ P.T @ P
        pulled = np.linalg.solve(X.T @ X + lam * P.T @ P, right.T).T
        error = ((pulled - true[:, k]) ** 2).mean(1)
        found, se = error.mean(), error.std(ddof=1) / np.sqrt(trials)
        predicted = transfer_mse(BETA, SIGMA2, NU, V2.tolist(), k, lam, alpha)
        return {
            "sweep": sweep,
            "client": k + 1,
            "value": value,
            "lam": lam,
            "predicted": predicted,
            "simulated": found,
            "standard_error": se,
            "z": (found - predicted) / se,
        }

    best = best_transfer(BETA, SIGMA2, NU, V2.tolist())
    rows = []
    for k in range(clients):
        rows.append(row("local", k, 0.0, 0.0, best.alpha))
        rows += [row("lambda", k, f, f * best.lam[k], best.alpha) for f in FACTORS]
        for p in POWERS:
            alpha = (SIGMA2 + BETA * V2) ** -p
            rows.append(row("alpha", k, p, best.lam[k], alpha / alpha.sum()))
    return pd.DataFrame(rows)


# -- the toy of figure 1 ------------------------------------------------------------------------------------


def toy(trials: int, rng: np.random.Generator, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (a row for every noise, client and way of learning; a row for every noise: what was clustered)."""
    shape = (trials, len(SPREAD))
    true = rng.uniform(-10, 10, (trials, 1, DIM)) + SPREAD[:, None] * rng.standard_normal((*shape, DIM))
    X = rng.uniform(-10, 10, (*shape, SAMPLES, DIM))
    P = rng.uniform(-10, 10, (trials, PUBLIC, DIM))
    standard = rng.standard_normal((*shape, SAMPLES))
    gram, public = np.einsum("tknd,tkne->tkde", X, X), np.einsum("tpd,tpe->tde", P, P)[:, None]
    rows, facts = [], []
    for noise in NOISES:
        y = np.einsum("tknd,tkd->tkn", X, true) + noise * standard
        moment = np.einsum("tknd,tkn->tkd", X, y)
        problem = Problem(gram, public, moment, P)
        local = np.linalg.solve(gram, moment[..., None])[..., 0]
        beta, nu = SAMPLES * 100 / 3, PUBLIC * 100 / 3  # what XᵀX and PᵀP are on average, times the identity
        best = best_transfer(beta, noise**2, nu, (SPREAD**2).tolist())
        everyone = np.tile(best.alpha, (trials, len(SPREAD), 1))
        solutions: dict[str, tuple[Floats, Floats | None, Floats | None]] = {
            "local": (local, local, local),
            "theorem": (problem.solve(local, everyone, best.lam), None, None),
        }
        apart = np.zeros(trials, dtype=bool)
        for c in (1, 2):
            mix = problem.mixes(local, c, seed)
            if c == 2:
                apart = (mix[:, 2, :2] == 0).all(1) & (mix[:, 0, 1] > 0)
            closed = problem.solve(local, mix, np.full(3, LAM))
            first = problem.descend(local, mix)
            later = first
            for _ in range(ROUNDS - 1):
                later = problem.descend(later, problem.mixes(later, c, seed))
            solutions[f"c={c}"] = (closed, first, later)
        facts.append({"noise": noise, "similar_clients_together": apart.mean()})
        for way, (closed, once, often) in solutions.items():
            for k in range(len(SPREAD)):
                error = ((closed[:, k] - true[:, k]) ** 2).mean(1)
                rows.append(
                    {
                        "noise": noise,
                        "way": way,
                        "client": k + 1,
                        "spread": SPREAD[k],
                        "closed_form": error.mean(),
                        "standard_error": error.std(ddof=1) / np.sqrt(trials),
                        "gradient_descent": _error(once, true, k),
                        "largest_difference": np.nan if once is None else np.abs(once - closed)[:, k].max(),
                        f"after_{ROUNDS}_rounds": _error(often, true, k),
                    }
                )
    return pd.DataFrame(rows), pd.DataFrame(facts)


def _error(w: Floats | None, true: Floats, k: int) -> float:
    """Return the mean squared error of one coordinate of client k's models; NaN where there are none."""
    return float("nan") if w is None else float(((w[:, k] - true[:, k]) ** 2).mean())


class Problem:
    """All trials of the toy at one noise: XᵀX [trials, clients, 2, 2], PᵀP [trials, 1, 2, 2], Xᵀy and P."""

    def __init__(self, gram: Floats, public: Floats, moment: Floats, P: Floats) -> None:
        self.gram, self.public, self.moment, self.P = gram, public, moment, P

    def mixes(self, w: Floats, clusters: int, seed: int) -> Floats:
        """Return α [trials, clients, clients]: the mean over the cluster of a client's predictions."""
        if clusters == 1:
            return np.full((*w.shape[:2], w.shape[1]), 1 / w.shape[1])
        uniform = torch.full((w.shape[1],), 1 / w.shape[1], dtype=torch.float64)
        s = torch.from_numpy(np.einsum("tpd,tkd->tkp", self.P, w))
        labels = np.stack([cluster(one, uniform, clusters, seed)[0] for one in s])
        same = (labels[:, :, None] == labels[:, None, :]).astype(np.float64)
        return np.asarray(same / same.sum(2, keepdims=True))

    def solve(self, w: Floats, mix: Floats, lam: Floats) -> Floats:
        """Return (XᵀX + λ PᵀP)⁻¹ (Xᵀy + λ PᵀP Σ_i α_i w_i), [trials, clients, 2]; `lam` [clients]."""
        pull = lam[:, None, None] * self.public
        right = self.moment + np.einsum("tkde,tke->tkd", pull, mix @ w)
        return np.asarray(np.linalg.solve(self.gram + pull, right[..., None])[..., 0])

    def descend(self, w: Floats, mix: Floats) -> Floats:
        """Return the models after gradient descent from `w` on ‖y − X w‖² + λ ‖P w − s̄‖², s̄ = P Σ_i α_i w_i."""
        target = np.einsum("tpd,tkd->tkp", self.P, mix @ w)
        curvature = 2 * (self.gram + LAM * self.public)
        step = 1 / np.linalg.eigvalsh(curvature)[..., -1:]
        for _ in range(STEPS):
            rest = np.einsum("tpd,tkd->tkp", self.P, w) - target
            gradient = 2 * (np.einsum("tkde,tke->tkd", self.gram, w) - self.moment)
            gradient += 2 * LAM * np.einsum("tpd,tkp->tkd", self.P, rest)
            w = w - step * gradient
        return w


# -- what is written ----------------------------------------------------------------------------------------


def draw_theorem(frame: pd.DataFrame, path: Path) -> None:
    """Write lines of the predicted error and points of the simulated one, with two standard errors."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_lam, by_alpha = figure.subplots(1, 2, sharey=True)
    for axes, sweep, label in (
        (by_lam, "lambda", "λ / λ*"),
        (by_alpha, "alpha", "p, with α proportional to (σ² + βv²)$^{-p}$"),
    ):
        for k, colour in enumerate(COLOURS[: len(V2)]):
            group = frame[(frame["sweep"] == sweep) & (frame["client"] == k + 1)]
            name = f"client {k + 1}, v² = {V2[k]:g}"
            axes.plot(group["value"], group["predicted"], color=colour, label=name)
            width = 2 * group["standard_error"]
            axes.errorbar(group["value"], group["simulated"], yerr=width, fmt="o", ms=4, color=colour)
        axes.axhline(SIGMA2 / BETA, color="grey", linestyle=":", label="alone")
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_xlabel(label)
    by_lam.set_xscale("log", base=2)
    by_lam.set_ylabel("squared error of a coordinate")
    by_lam.legend(fontsize=8)
    by_lam.set_title("pull (α as in the theorem)", fontsize=10)
    by_alpha.set_title("mix (λ = λ*)", fontsize=10)
    figure.savefig(path, dpi=130)


WAYS = {"local": "alone", "c=1": "c = 1", "c=2": "c = 2 (clustered)", "theorem": "best λ and α (Theorem 4.2)"}


def draw_toy(frame: pd.DataFrame, path: Path) -> None:
    """Write the error of each client over the noise, a line for each way of learning."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 3))
    for k, axes in enumerate(panels, 1):
        for number, (way, label) in enumerate(WAYS.items()):
            group = frame[(frame["way"] == way) & (frame["client"] == k)]
            style = "--" if way == "theorem" else "-"
            axes.plot(group["noise"], group["closed_form"], style, color=COLOURS[number], label=label)
            axes.plot(group["noise"], group["gradient_descent"], "x", color=COLOURS[number])
        axes.set(xscale="log", yscale="log", xlabel="standard deviation of the labels")
        axes.set_title(f"client {k}, σ = {SPREAD[k - 1]:g}", fontsize=10)
    panels[0].set_ylabel("squared error of a coordinate\n(line: closed form, x: gradient descent)")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def readme(frame: pd.DataFrame, errors: pd.DataFrame, facts: pd.DataFrame, args: argparse.Namespace) -> str:
    """Return the page that explains the numbers."""
    settings = f"seed {args.seed}, {args.trials:,} trials of the theorem, {args.toy_trials:,} of the toy"
    head = f"# PerFed-CKT on linear regression\n\nMade by `python -m studies.perfed_ckt_theory` ({settings})."
    return "\n\n".join([head, theorem_text(frame), toy_text(errors, facts)]) + "\n"


def theorem_text(frame: pd.DataFrame) -> str:
    """Return the part of the page on Theorem 4.2."""
    at_best = frame[(frame["sweep"] == "lambda") & (frame["value"] == 1)].to_dict("records")
    alone = frame[frame["sweep"] == "local"]["simulated"].tolist()
    best = best_transfer(BETA, SIGMA2, NU, V2.tolist())
    rows = "\n".join(
        f"| {r['client']} | {r['lam']:.5f} | {alpha:.5f} | {r['predicted']:.5f} | "
        f"{r['simulated']:.5f} ± {r['standard_error']:.5f} | {local:.5f} |"
        for r, alpha, local in zip(at_best, best.alpha, alone, strict=True)
    )
    beaten = _beaten(frame)
    rank = f"beats it by more than {beaten:.2f} standard errors" if beaten > 0 else "beats it"
    return f"""## Theorem 4.2

Five clients, β = {BETA:g}, σ² = {SIGMA2:g}, ν = {NU:g}, v² = ({", ".join(f"{v:g}" for v in V2)}); squared error
of one coordinate of the estimate at the theorem's λ and α, simulated ± one standard error.

| client | λ* | α* | predicted | simulated | alone, simulated |
|---|---|---|---|---|---|
{rows}

Alone, everybody has σ²/β = {SIGMA2 / BETA:.5f}. Over all {len(frame)} settings (`theorem.csv`), each with trials of
its own, the largest deviation from the prediction is {frame["z"].abs().max():.2f} standard errors and the root mean
square {np.sqrt((frame["z"] ** 2).mean()):.2f}, where 1 is expected. The theorem's choice is the best of both sweeps:
in simulation no other λ or α {rank}.

![predicted (lines) and simulated (points, ± two standard errors)](theorem.png)"""


def toy_text(errors: pd.DataFrame, facts: pd.DataFrame) -> str:
    """Return the part of the page on the toy."""
    rows = []
    for noise, share in facts.itertuples(index=False):
        group = errors[errors["noise"] == noise]
        cells = [" / ".join(f"{e:.3g}" for e in group[group["way"] == way]["closed_form"]) for way in WAYS]
        rows.append(f"| {noise:g} | {' | '.join(cells)} | {share:.1%} |")
    pulled = errors[errors["way"].isin(["c=1", "c=2"])]
    later = pulled[f"after_{ROUNDS}_rounds"] / pulled["closed_form"]
    return f"""## The toy of figure 1

θ ~ U(−10, 10)², σ = (2, 5, 200), {SAMPLES} private and {PUBLIC} public samples from [−10, 10]², λ = {LAM:g}, and
s(w, x) = xᵀw: the linear closed form. The registered method exchanges softmax probabilities, which have none.
Squared error of one coordinate, clients 1 / 2 / 3, by the noise of the labels, which the paper does not print:

| standard deviation | {" | ".join(WAYS.values())} | 1 and 2 together, 3 apart |
|---|---|---|---|---|---|
{chr(10).join(rows)}

One centroid for everybody (c = 1) lets the far client spoil the near ones and the other way round; two clusters
set it apart. But λ = {LAM:g} all but replaces an estimate by its centroid (on average λ PᵀP is {LAM:g} times XᵀX):
with precise labels each of the near clients then pays for the distance to the other, and is better off alone. Their
transfer gains where the noise of an estimate exceeds that distance; the best λ and α adapt to it.

Gradient descent on the objective ({STEPS} steps a client, from its own estimate) ends at the closed form: the largest
difference of a weight is {pulled["largest_difference"].max():.1e}. {ROUNDS} rounds instead of one, each with new
centroids, multiply the errors by {later.min():.2f} to {later.max():.2f} (`toy.csv`).

![error by label noise (lines: closed form, crosses: gradient descent)](toy.png)"""


def _beaten(frame: pd.DataFrame) -> float:
    """Return by how many standard errors another setting of a sweep is better than the theorem's, at most."""
    margins = [0.0]
    for _, group in frame[frame["sweep"] != "local"].groupby(["sweep", "client"]):
        at = group[group["value"] == 1].iloc[0]
        noise = np.hypot(group["standard_error"], at["standard_error"])
        margins.append(float(((at["simulated"] - group["simulated"]) / noise).max()))
    return max(margins)


def main() -> None:
    """Run both parts and write tables, plots and README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results/perfed_ckt_theory"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=400_000)
    parser.add_argument("--toy-trials", type=int, default=400)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    frame = theorem(args.trials, np.random.default_rng([args.seed, 0]))
    middle = time.perf_counter()
    errors, facts = toy(args.toy_trials, np.random.default_rng([args.seed, 1]), args.seed)
    end = time.perf_counter()
    frame.to_csv(args.out / "theorem.csv", index=False, float_format="%.6g")
    errors.to_csv(args.out / "toy.csv", index=False, float_format="%.6g")
    draw_theorem(frame, args.out / "theorem.png")
    draw_toy(errors, args.out / "toy.png")
    text = readme(frame, errors, facts, args)
    (args.out / "README.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"seed {args.seed}: theorem {middle - begin:.1f} s, toy {end - middle:.1f} s -> {args.out}")


if __name__ == "__main__":
    main()
