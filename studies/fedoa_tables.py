"""FedOA's tables out of finished leave-one-out experiments: accuracy on what was held out, and features by round.

    tailorfl reproduce fedoa_pacs --out runs/fedoa_pacs
    python studies/fedoa_tables.py runs/fedoa_pacs

writes fedoa.md into the folder, with features.png where the distance of personal from global features was recorded in
several rounds. Methods are judged as in the paper: by personal models where they have them, each on everything that was
held out, and by the global model where they have not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from tailorfl.evaluation.comparisons import interval
from tailorfl.report.result import results
from tailorfl.settings.loading import load

TASKS = ("entailment", "sentiment", "paraphrase", "reading", "mean")
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "fedoa_flan": {
        label: dict(zip(TASKS, numbers, strict=True))
        for label, numbers in {
            "Centralized": (41.75, 76.87, 43.38, 64.05, 56.51),
            "FedIT": (43.00, 80.63, 43.63, 66.17, 58.36),
            "pFedMe": (37.32, 75.99, 44.53, 50.81, 52.16),
            "FedLoRA": (41.03, 78.48, 43.83, 64.57, 56.98),
            "PerAda": (36.86, 76.45, 44.24, 52.36, 52.48),
            "FedSDR": (36.70, 66.90, 43.43, 41.85, 47.22),
            "FedOA": (39.73, 82.63, 45.86, 67.96, 59.05),
        }.items()
    },
    # The mean alone: the domains of Office-Home are others than those of PACS.
    "fedoa_pacs": {
        "FedIT": {"mean": 69.97},
        "pFedMe": {"mean": 53.96},
        "FedLoRA": {"mean": 64.47},
        "PerAda": {"mean": 53.98},
        "FedOA": {"mean": 69.35},
    },
}
"""ROUGE-1 of LLaMA-7B by held-out task, accuracy of a ViT on held-out domains of Office-Home; percent."""


def collected(folder: Path) -> pd.DataFrame:
    """Return a row a job: variant, label, seed, metric, set (shifted or local), value in percent."""
    rows = []
    for variant, result in results(folder).items():
        for summary, _ in result.jobs:
            sets = summary["metrics"][summary["model"]]
            (held,) = [name for name in sets if name not in ("local", "val", "global")]
            for kind, name in (("shifted", held), ("local", "local")):
                for metric in ("accuracy", "rouge1", "feature_distance"):
                    if metric in sets[name]:
                        value = sets[name][metric]["mean"] * (100 if metric == "accuracy" else 1)
                        row = {"variant": variant, "label": summary["label"], "seed": summary["seed"]}
                        rows.append({**row, "metric": metric, "set": kind, "value": value})
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame, published: dict[str, dict[str, float]]) -> list[str]:
    """Return a table of one metric on one set: a row a method, a column a variant, and their mean."""
    variants = list(dict.fromkeys(frame["variant"]))
    lines = [f"| Method | {' | '.join(variants)} | mean |", "| --- |" + " ---: |" * (len(variants) + 1)]
    for label in dict.fromkeys(frame["label"]):
        mine = frame[frame["label"] == label]
        cells = [_cell(list(mine[mine["variant"] == v]["value"])) for v in variants]
        cells.append(_cell(list(mine.groupby("seed")["value"].mean())))
        known = published.get(label, {})
        columns = [*variants, "mean"]
        cells = [
            f"{cell} ({known[c]})" if c in known else cell for c, cell in zip(columns, cells, strict=True)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _cell(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.2f} ± {half:.2f}" if len(values) > 1 else f"{mean:.2f}"


def features_by_round(folder: Path) -> pd.DataFrame:
    """Return variant, label, seed, round and the mean distance of features on the clients' own test parts."""
    found = []
    for variant, result in results(folder).items():
        frame = result.clients
        if "feature_distance" not in frame:
            continue
        mine = frame[(frame["set"] == "local") & (frame["model"] == "personal")]
        means = mine.groupby(["label", "seed", "round"])["feature_distance"].mean().dropna().reset_index()
        found.append(means.assign(variant=variant))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def plot(frame: pd.DataFrame, file: Path) -> None:
    """Draw the mean distance by round, a line a method."""
    figure, axes = plt.subplots(figsize=(5.5, 3.5))
    for label, lines in frame.groupby("label", sort=False):
        by_round = lines.groupby("round")["feature_distance"].mean()
        axes.plot(by_round.index, by_round, marker="o", markersize=3, label=str(label))
    axes.set_xlabel("round")
    axes.set_ylabel("distance of personal from global features")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def page(folder: Path) -> str:
    """Return the tables as Markdown."""
    name = load(folder / "config.yaml", []).name
    frame = collected(folder)
    lines = [f"# {name}", "", "Mean over clients and seeds ± half width of the 95 % interval over seeds."]
    for metric, title in (("accuracy", "Accuracy (%)"), ("rouge1", "ROUGE-1 (%)")):
        for kind, where in (("shifted", "what was held out"), ("local", "the clients' own test parts")):
            part = frame[(frame["metric"] == metric) & (frame["set"] == kind)]
            if part.empty:
                continue
            numbers = PUBLISHED.get(name, {}) if kind == "shifted" and _is_published(name, metric) else {}
            note = "; published numbers in brackets, of another model and scale" if numbers else ""
            lines += ["", f"## {title} on {where}{note}", "", *table(part, numbers)]
    return "\n".join(lines) + "\n"


def _is_published(name: str, metric: str) -> bool:
    """Return the paper has ROUGE-1 of texts, and accuracy of images."""
    return metric == ("rouge1" if name == "fedoa_flan" else "accuracy")


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="of the finished experiment: fedoa_flan, fedoa_ablation or fedoa_pacs"
    )
    folder = parser.parse_args().folder
    (folder / "fedoa.md").write_text(page(folder), encoding="utf-8")
    frame = features_by_round(folder)
    if not frame.empty and frame["round"].nunique() > 1:
        plot(frame, folder / "features.png")


if __name__ == "__main__":
    main()
