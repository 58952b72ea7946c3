"""Accuracy against privacy out of a finished experiment whose variants differ in it.

    tailorfl reproduce perada_dp --out runs/perada_dp
    python studies/privacy_tables.py runs/perada_dp

writes privacy.csv into the folder, a row a job, and privacy.md: a row a variant, and for every method the accuracy of
its deployable models on the clients' own test parts (mean over clients and seeds, 95 % interval over seeds), the noise
σ, and ε over clients.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from tailorfl.evaluation.comparisons import interval
from tailorfl.report.result import results
from tailorfl.settings.loading import load


def collected(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return variant -> label -> summaries of its seeds."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for variant, result in results(folder).items():
        jobs = found.setdefault(variant, {})
        for summary, _ in result.jobs:
            jobs.setdefault(summary["label"], []).append(summary)
    return found


def frame_of(found: dict[str, dict[str, list[dict[str, Any]]]]) -> pd.DataFrame:
    """Return a row a job."""
    rows = []
    for variant, jobs in found.items():
        for label, summaries in jobs.items():
            for summary in summaries:
                own = summary["metrics"][summary["model"]]["local"]["accuracy"]
                spent = summary.get("privacy", {})
                epsilon = {f"epsilon_{key}": value for key, value in spent.get("epsilon", {}).items()}
                row = {"variant": variant, "label": label, "seed": summary["seed"], "accuracy": own["mean"]}
                rows.append({**row, "std": own["std"], "noise": spent.get("noise"), **epsilon})
    return pd.DataFrame(rows)


def page(name: str, found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the tables as Markdown."""
    labels = list(dict.fromkeys(label for jobs in found.values() for label in jobs))
    lines = [
        f"# {name}",
        "",
        *_covered(found),
        "Accuracy (%) of deployable models on the clients' own test parts, mean over clients and seeds ± half width of "
        "the 95 % interval over seeds; in brackets the standard deviation over clients.",
        "",
        f"| | {' | '.join(labels)} |",
        "| --- |" + " ---: |" * len(labels),
    ]
    for variant, jobs in found.items():
        lines.append(f"| {variant} | {' | '.join(_accuracy(jobs.get(label, [])) for label in labels)} |")
    lines += [
        "",
        "What was spent: σ (of the clients, where each has its own), and ε of the clients (mean ± standard deviation "
        "over clients, largest), of the first seed.",
        "",
        f"| | {' | '.join(labels)} |",
        "| --- |" + " --- |" * len(labels),
    ]
    for variant, jobs in found.items():
        lines.append(f"| {variant} | {' | '.join(_spent(jobs.get(label, [])) for label in labels)} |")
    return "\n".join(lines) + "\n"


def _covered(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Return what ε is of, above the tables."""
    every = (
        s["privacy"] for jobs in found.values() for found in jobs.values() for s in found if "privacy" in s
    )
    privacy = next(every, None)
    if privacy is None or "neighbours" not in privacy:
        return []
    drawn = {"poisson": "Poisson batches", "shuffle": "shuffled batches"}.get(privacy["batches"], "rounds")
    return [
        f"ε is of neighbours by {privacy['neighbours']}; {drawn}. Covered are all gradients of training and of the "
        "models that are deployed. Not covered are the accuracies below (numbers of private test parts), the choice of "
        "settings, how many samples a client has, and the split.",
        "",
    ]


def _accuracy(summaries: list[dict[str, Any]]) -> str:
    if not summaries:
        return "diverged"
    own = [s["metrics"][s["model"]]["local"] for s in summaries]
    mean, half = interval([100 * o["accuracy"]["mean"] for o in own])
    spread = sum(100 * o["accuracy"]["std"] for o in own) / len(own)
    return f"{mean:.1f} ± {half:.1f} ({spread:.1f})" if len(own) > 1 else f"{mean:.1f} ({spread:.1f})"


def _spent(summaries: list[dict[str, Any]]) -> str:
    if not summaries or "privacy" not in summaries[0]:
        return "–"
    privacy = summaries[0]["privacy"]
    eps = privacy["epsilon"]
    own = privacy.get("noise_of_clients")
    sigma = f"{privacy['noise']:.3g}" if own is None else f"{own['min']:.3g} to {own['max']:.3g}"
    return f"σ = {sigma}; {eps['mean']:.2f} ± {eps['std']:.2f}, {eps['max']:.2f}"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the finished experiment perada_dp or heart_dp")
    folder = parser.parse_args().folder
    name = load(folder / "config.yaml", []).name
    found = collected(folder)
    frame_of(found).to_csv(folder / "privacy.csv", index=False, lineterminator="\n")
    (folder / "privacy.md").write_text(page(name, found), encoding="utf-8")


if __name__ == "__main__":
    main()
