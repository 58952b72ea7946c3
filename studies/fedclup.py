"""FedCLUP's claims on problems whose truth is known: errors against rounds, rates, and λ that grows.

    python studies/fedclup.py tradeoff OUT      recipe fedclup_tradeoff: total error against rounds, three λ, three R
    python studies/fedclup.py rate OUT          recipe fedclup_rate: predicted against observed contraction
    python studies/fedclup.py dynamic OUT       recipe fedclup_dynamic: growing λ against every fixed λ
    python studies/fedclup.py tune OUT          how the schedules of fedclup_dynamic were chosen, by validation error

Every recipe also runs by `tailorfl reproduce`; here the errors against the truth are added, and every seed draws data
of its own. OUT gets CSV files and plots.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from studies.linear_errors import Truth, linear_models
from tailorfl.data.synthetic import closed_form
from tailorfl.evaluation.comparisons import interval
from tailorfl.methods.fedclup import FedCLUP
from tailorfl.report.plots import COLOURS, DPI
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import expand, load
from tailorfl.theory.fedclup import round_rate, schedule

TARGETS = (1.05, 1.2, 1.5)
"""Total errors to reach, in units of the smallest statistical error of the fixed λ."""
TUNING_SEED = 100


def simulations(config: ExperimentConfig) -> Iterator[tuple[str, int, Simulation, Truth]]:
    """Yield (label, seed, simulation before its first round, truth); data are drawn anew for every seed."""
    for seed in config.seeds:
        own = load(config, {"data": {"options": {**config.data.options, "seed": seed}}})
        federation = make_federation(own, seed)
        for method in own.methods:
            sim = make_simulation(Job(own, method, seed), federation)
            assert sim.method.weights is not None
            yield method.label, seed, sim, Truth.of(federation, sim.method.weights)


def curve(sim: Simulation, truth: Truth, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the errors after every round, means over all clients and over those that have trained so far."""
    method = sim.method
    assert isinstance(method, FedCLUP)
    x, y, weight = validation(sim)
    for _ in range(rounds):
        lam = method.lam_of(sim.server)
        sim.step()
        models = linear_models(sim, truth.weights.shape[1])
        errors = truth.errors(models, lam)
        trained = torch.tensor(sim.states.clients)
        loss = (0.5 * ((x @ models[:, :, None])[:, :, 0] - y) ** 2 * weight).sum(1)
        yield {
            "round": sim.round,
            "lam": lam,
            "scalars": sim.traffic.up + sim.traffic.down_unicast,
            "trained": len(trained),
            "total_all": float(errors["total"].mean()),
            **{name: float(error[trained].mean()) for name, error in errors.items()},
            "validation": float(loss[trained].mean()),
        }


def validation(sim: Simulation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets and weights 1/n of all clients' validation parts (all of one size or empty)."""
    source, rows = sim.federation.source, np.stack(sim.federation.val[: sim.federation.num_clients])
    taken = torch.from_numpy(rows)
    return source.x[taken], source.y[taken][..., 0], torch.full(taken.shape, 1 / max(1, rows.shape[1]))


def curves(config: ExperimentConfig) -> pd.DataFrame:
    """Return `curve` of every method and seed of every variant of a recipe."""
    rows = []
    for variant, experiment in expand(config).items():
        for label, seed, sim, truth in simulations(experiment):
            begin = time.perf_counter()
            found = list(curve(sim, truth, experiment.rounds))
            rows += [{"variant": variant, "label": label, "seed": seed, **row} for row in found]
            print(f"{variant}, {label}, seed {seed}: {time.perf_counter() - begin:.1f} s", flush=True)
    return pd.DataFrame(rows)


def over_seeds(frame: pd.DataFrame, by: list[str], values: list[str]) -> pd.DataFrame:
    """Return mean and half width of the 95 % interval of every value, one row a group."""
    rows = []
    for key, group in frame.groupby(by, sort=False):
        row = dict(zip(by, key, strict=True))
        for value in values:
            row[value], row[f"{value}_ci"] = interval(group[value].tolist())
        rows.append(row)
    return pd.DataFrame(rows)


# -- the trade-off ------------------------------------------------------------------------------------------


def tradeoff(out: Path) -> None:
    """Write errors.csv (every round), summary.csv and tradeoff.png."""
    frame = curves(load("fedclup_tradeoff"))
    measures = ["total", "optimisation", "statistical"]
    mean = over_seeds(frame, ["variant", "label", "round", "scalars"], measures)
    write(mean, out / "errors.csv")
    rows = []
    for (variant, label, seed), run in frame.groupby(["variant", "label", "seed"], sort=False):
        last = float(run["total"].iloc[-1])
        near = int(run["round"][run["total"] <= 1.1 * last].iloc[0])
        rows.append({"variant": variant, "label": label, "seed": seed, "final_total": last, "rounds": near})
    summary = over_seeds(pd.DataFrame(rows), ["variant", "label"], ["final_total", "rounds"])
    write(summary, out / "summary.csv")
    print(summary.to_string(index=False))
    panels(mean, out / "tradeoff.png", "round", "total", extra="optimisation")


# -- rates --------------------------------------------------------------------------------------------------


def rate(out: Path) -> None:
    """Write rates.csv and rate.png: the squared error of w each round, and until it is a millionth."""
    wanted, rows, lines = 1e-6, [], []
    for variant, experiment in expand(load("fedclup_rate")).items():
        for label, seed, sim, truth in simulations(experiment):
            method = sim.method
            assert isinstance(method, FedCLUP)
            assert method.smoothness is not None
            assert method.convexity is not None
            plan = schedule(method.convexity, method.smoothness, method.lam)
            best, _ = closed_form(truth.H, truth.c, truth.p, method.lam)
            errors = [distance(sim, best)]
            while errors[-1] > wanted * errors[0] and sim.round < plan.rounds(wanted):
                sim.step()
                errors.append(distance(sim, best))
            ratios = np.divide(errors[1:], errors[:-1])
            rows.append(
                {
                    "variant": variant,
                    "label": label,
                    "seed": seed,
                    "K": method.steps_of_theory,
                    "predicted_rate": plan.rate,
                    "sharper_rate": round_rate(method.convexity, method.smoothness, method.lam, plan.gamma),
                    "worst_observed_rate": float(ratios.max()),
                    "mean_observed_rate": float((errors[-1] / errors[0]) ** (1 / (len(errors) - 1))),
                    "predicted_rounds": plan.rounds(wanted),
                    "observed_rounds": len(errors) - 1,
                }
            )
            lines += [
                {"variant": variant, "label": label, "seed": seed, "round": t, "error": e / errors[0]}
                for t, e in enumerate(errors)
            ]
    keys = ["variant", "label", "K", "predicted_rate", "sharper_rate", "predicted_rounds"]
    observed = ["worst_observed_rate", "mean_observed_rate", "observed_rounds"]
    table = over_seeds(pd.DataFrame(rows), keys, observed)
    write(table, out / "rates.csv")
    print(table.to_string(index=False))
    frame = pd.DataFrame(lines)
    groups = frame.groupby(["variant", "label", "round"], sort=False)["error"]
    mean = groups.mean()[groups.count() == frame["seed"].nunique()].reset_index()
    predicted = {(row["variant"], row["label"]): row["sharper_rate"] for row in table.to_dict("records")}
    panels(mean, out / "rate.png", "round", "error", predicted=predicted)


def distance(sim: Simulation, best: torch.Tensor) -> float:
    """Return ‖w − w*‖²."""
    shared = sim.global_model()
    assert shared is not None
    w = next(iter(shared.values()))
    assert isinstance(w, torch.Tensor)
    return float((w.double().reshape(-1) - best).square().sum())


# -- growing λ ----------------------------------------------------------------------------------------------


def dynamic(out: Path) -> None:
    """Write curves.csv, targets.csv (rounds and scalars to each target), and plots over rounds and scalars."""
    frame = curves(load("fedclup_dynamic"))
    measures = ["total", "total_all", "lam", "trained", "validation"]
    mean = over_seeds(frame, ["variant", "label", "round"], ["scalars", *measures])
    write(
        mean.drop(columns=[f"{m}_ci" for m in ("lam", "trained", "scalars", "validation")]),
        out / "curves.csv",
    )
    rows = []
    for (variant, seed), runs in frame.groupby(["variant", "seed"], sort=False):
        fixed = runs[~runs["label"].str.startswith("dynamic")]
        best = float(fixed["statistical"].groupby(fixed["label"]).last().min())
        for label, run in runs.groupby("label", sort=False):
            for share in TARGETS:
                for over in ("total", "total_all"):
                    hit = run[run[over] <= share * best]
                    first = hit.iloc[0] if len(hit) else None
                    rows.append(
                        {
                            "variant": variant,
                            "label": label,
                            "clients": "all" if over == "total_all" else "trained",
                            "target": share,
                            "seed": seed,
                            "reached": float(first is not None),
                            "rounds": np.inf if first is None else float(first["round"]),
                            "scalars": np.inf if first is None else float(first["scalars"]),
                        }
                    )
    found = pd.DataFrame(rows)
    keys = ["variant", "clients", "target", "seed"]
    constant = ~found["label"].str.startswith("dynamic")
    for cost in ("rounds", "scalars"):  # in how many of the seeds every fixed λ needs more
        least = found[constant].groupby(keys)[cost].min().rename("least").reset_index()
        found[f"fewest_{cost}"] = (found[cost] < found.merge(least, on=keys)["least"]).astype(float)
    shares = ["reached", "fewest_rounds", "fewest_scalars"]
    table = over_seeds(found, ["variant", "clients", "target", "label"], [*shares, "rounds", "scalars"])
    table = table.drop(columns=[f"{share}_ci" for share in shares])
    write(table, out / "targets.csv")
    chosen = table[(table["clients"] == "trained") & np.isfinite(table["rounds"])]
    print(chosen.to_string(index=False))
    for number in dict.fromkeys(str(v).split(",")[0] for v in mean["variant"]):
        part = mean[mean["variant"].str.startswith(f"{number},")]
        name = number.replace(" ", "_")
        panels(part, out / f"rounds_{name}.png", "round", "total")
        panels(part[part["scalars"] > 0], out / f"scalars_{name}.png", "scalars", "total")


def tune(out: Path) -> None:
    """Write tuning.csv: the mean validation error over 20 rounds of each schedule, on data of another seed.

    These data have 800 validation samples a client: with 50 the noise of the labels hides which λ is best.
    """
    config = load("fedclup_dynamic")
    base = {"name": "fedclup", "gamma": "edge", "smoothness": 23.0, "lr_rule": "deterministic"}
    methods = []
    for (patience, factor), most in itertools.product(((1, None), (1, 4.0), (3, None)), (0.5, 5.0, 50.0)):
        steps = {"values": [0.0, most]} if factor is None else {"least": 0.02, "factor": factor, "most": most}
        rule = {"kind": "dynamic", "patience": patience, "tol": 0.01, **steps}
        label = f"patience {patience}, {'at once' if factor is None else f'factor {factor:g}'}, most {most:g}"
        methods.append({**base, "label": label, "schedule": rule})
    dropped = ("variants", "methods", "seeds", "rounds")
    plain = {key: value for key, value in config.to_dict().items() if key not in dropped}
    variants = {}
    for name, change in config.variants.items():
        if name.startswith("10 clients"):
            options = {**change["data"]["options"], "samples": 1000}
            variants[name] = {
                "data": {"options": options, "split": {"train": 0.2, "val": 0.8, "test": "official"}}
            }
    tuning = {"methods": methods, "seeds": [TUNING_SEED], "rounds": 20, "variants": variants}
    frame = curves(load({**plain, **tuning}))
    table = frame.groupby(["variant", "label"], sort=False)[["validation", "total"]].mean().reset_index()
    table = table.sort_values(["variant", "validation"])
    write(table, out / "tuning.csv")
    print(table.to_string(index=False))


# -- files --------------------------------------------------------------------------------------------------


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a table with five significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, float_format="%.5g")


def panels(
    frame: pd.DataFrame,
    path: Path,
    x: str,
    y: str,
    *,
    extra: str | None = None,
    predicted: dict[tuple[str, str], float] | None = None,
) -> None:
    """Draw a panel a variant with a line a label, logarithmic in y; `extra` and `predicted` as thin dotted lines."""
    variants = list(dict.fromkeys(frame["variant"]))
    figure = Figure(figsize=(4.1 * len(variants) + 1.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes_of: list[Axes] = list(np.atleast_1d(figure.subplots(1, len(variants), squeeze=True)))
    for axes, variant in zip(axes_of, variants, strict=True):
        part = frame[frame["variant"] == variant]
        for number, (label, line) in enumerate(part.groupby("label", sort=False)):
            grows, untuned = str(label).startswith("dynamic"), str(label).endswith("untuned")
            colour = "black" if grows else COLOURS[number % len(COLOURS)]
            dashes, wide = ("--" if untuned else "-"), (2.4 if grows else 1.4)
            axes.plot(line[x], line[y], label=str(label), linewidth=wide, color=colour, linestyle=dashes)
            if f"{y}_ci" in line and (grows or part["label"].nunique() <= 3):
                low = (line[y] - line[f"{y}_ci"].fillna(0)).clip(lower=line[y] / 20)
                axes.fill_between(line[x], low, line[y] + line[f"{y}_ci"].fillna(0), alpha=0.15, color=colour)
            if extra is not None:
                axes.plot(line[x], line[extra], linewidth=0.9, color=colour, linestyle=":")
            if predicted is not None:
                bound = predicted[variant, str(label)] ** line[x]
                axes.plot(line[x], bound, linewidth=0.9, color=colour, linestyle=":")
        axes.set_yscale("log")
        if x == "scalars":
            axes.set_xscale("log")
        axes.set_title(variant, fontsize=11)
        axes.set_xlabel("scalars sent and received by all clients" if x == "scalars" else x)
        axes.grid(color="0.88", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if extra is not None:
            axes.set_ylim(bottom=part[y].min() / 5)
    about = {"total": "squared distance to the truth", "error": "‖w − w*‖², share of the first"}[y]
    if extra is not None:
        about += f"\n(dotted: {extra} error)"
    if predicted is not None:
        about += "\n(dotted: predicted)"
    axes_of[0].set_ylabel(about)
    axes_of[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def main() -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    studies = {"tradeoff": tradeoff, "rate": rate, "dynamic": dynamic, "tune": tune}
    parser.add_argument("study", choices=sorted(studies))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    studies[given.study](given.out)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
