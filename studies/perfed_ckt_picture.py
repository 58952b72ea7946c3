"""Accuracy against scalars communicated: the picture and the table of the recipe perfed_ckt_cifar.

    tailorfl reproduce perfed_ckt_cifar
    python studies/perfed_ckt_picture.py runs/perfed_ckt_cifar      # writes into results/perfed_ckt_cifar

For every variant: `scalars_<variant>.png`, and a part of README.md and summary.csv. Scalars are the library's
counters: parameters, predictions and losses sent by clients, plus what the server sends, each receiver counted
(unicast) or each distinct payload once a round (multicast, the count of PerFed-CKT's table).

Clients are sampled in proportion to their data, so that small ones may never take part. Accuracy is therefore shown
twice: the mean over all clients, and over those that took part at least once (the same ones for all methods).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tailorfl.evaluation.comparisons import interval, paired
from tailorfl.report.plots import COLOURS
from tailorfl.report.result import ExperimentResult, results

MODELS = {"all": "all clients", "sampled": "clients that took part at least once"}
COUNTS = {"multicast": "each payload of the server once", "unicast": "every receiver counted"}


def curves(result: ExperimentResult) -> pd.DataFrame:
    """Return label, seed, round, all, sampled (accuracies), worst10, multicast, unicast (cumulative), clients.

    A row an evaluated round. `clients` is the number of clients that took part at least once.
    """
    rows = []
    for summary, store in result.jobs:
        rounds, clients = store.rounds(), store.clients()
        took_part = {int(client) for cohort in rounds["clients"] for client in cohort}
        own = clients[(clients["set"] == "local") & (clients["model"] == summary["model"])]
        for number, group in own.groupby("round"):
            at = rounds[rounds["round"] == number].iloc[0]
            last = number == summary["rounds"]
            rows.append(
                {
                    "label": summary["label"],
                    "seed": summary["seed"],
                    "round": number,
                    "all": group["accuracy"].mean(),
                    "sampled": group[group["client"].isin(took_part)]["accuracy"].mean(),
                    "worst10": group["accuracy"].nsmallest(-(-len(group) // 10)).mean(),
                    "up": at["up"],
                    "multicast": at["up"] + at["down_multicast"],
                    "unicast": at["up"] + at["down_unicast"],
                    "clients": len(took_part),
                    "seconds": summary["seconds"] if last else float("nan"),
                    "last": last,
                }
            )
    return pd.DataFrame(rows)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row a method: means over seeds of its last round, half widths of 95 %, differences to LocalTrain."""
    final, rows = frame[frame["last"]], []
    local = final[final["label"] == "LocalTrain"].set_index("seed")
    for label, group in final.groupby("label", sort=False):
        row: dict[str, float | str] = {"label": str(label), "seeds": len(group)}
        for key in ("all", "sampled"):
            row[key], row[f"{key}_ci"] = interval(group[key].tolist())
            found = paired(group[key].tolist(), local.loc[group["seed"], key].tolist())
            row[f"{key}_gain"], row[f"{key}_gain_ci"] = found.mean, found.half_width
        for key in ("worst10", "up", "multicast", "unicast", "clients", "seconds"):
            row[key] = float(group[key].mean())
        rows.append(row)
    return pd.DataFrame(rows)


def draw(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Write four panels: accuracy of all and of sampled clients, against multicast and unicast scalars."""
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for row, key in enumerate(MODELS):
        for column, count in enumerate(COUNTS):
            _panel(panels[row, column], frame, key, count)
        panels[row, 0].set_ylabel(f"accuracy in %, {MODELS[key]}")
    for column, (count, meaning) in enumerate(COUNTS.items()):
        panels[1, column].set_xlabel(f"scalars so far, {count} ({meaning})")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.suptitle(f"{title}: means over seeds, a mark every 10 rounds")
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, frame: pd.DataFrame, key: str, count: str) -> None:
    for number, (label, group) in enumerate(frame.groupby("label", sort=False)):
        mean = group.groupby("round")[[key, count]].mean()
        colour = COLOURS[number % len(COLOURS)]
        if mean[count].max() == 0:
            axes.axhline(mean[key].iloc[-1], color="0.35", linestyle=":", label=f"{label}, at the end")
            continue
        style = "-" if number < len(COLOURS) else "--"
        axes.plot(mean[count], mean[key], style, marker="osD^vPX"[number % 7], color=colour, label=str(label))
    axes.set_xscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    axes.grid(color="0.9")


def section(name: str, table: pd.DataFrame, picture: str) -> str:
    """Return the part of the page on one variant."""
    lines = [
        "| method | seeds | all clients | − LocalTrain | lowest 10 % | took part | − LocalTrain | scalars up | "
        "up + down, multicast | up + down, unicast | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        alone = row["label"] == "LocalTrain"
        gains = ["–" if alone else _percent(row[f"{k}_gain"], row[f"{k}_gain_ci"], "+") for k in MODELS]
        cells = [
            str(row["label"]),
            f"{row['seeds']:.0f}",
            _percent(row["all"], row["all_ci"]),
            gains[0],
            f"{100 * row['worst10']:.1f}",
            _percent(row["sampled"], row["sampled_ci"]),
            gains[1],
            *(f"{row[key]:.3g}" if row[key] else "0" for key in ("up", "multicast", "unicast")),
            f"{row['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    part = f"{table['clients'].iloc[0]:.1f} clients took part at least once (mean over seeds)."
    return "\n".join([f"## {name}", "", part, "", *lines, "", f"![accuracy by scalars]({picture})"])


def _percent(mean: float, width: float, sign: str = "") -> str:
    return f"{100 * mean:{sign}.1f} ± {100 * width:.1f}"


HEAD = """# PerFed-CKT on CIFAR-10: accuracy and communication

Made by `tailorfl reproduce perfed_ckt_cifar` and `python studies/perfed_ckt_picture.py runs/perfed_ckt_cifar`.

Accuracy in % of the model that each client deploys, on its own test part after the last round: mean over seeds ±
half width of the 95 % interval; "− LocalTrain" is the paired difference. Seconds are those of one thread."""


def main() -> None:
    """Write the pictures, README.md and summary.csv of all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path, help="result folder of the recipe")
    parser.add_argument("--out", type=Path, default=Path("results/perfed_ckt_cifar"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sections, tables = [], []
    for result in results(args.run).values():
        frame, name = curves(result), result.path.name
        picture = f"scalars_{name}.png"
        draw(frame, name.replace("-", " "), args.out / picture)
        table = summarise(frame)
        sections.append(section(name.replace("-", " "), table, picture))
        tables.append(table.assign(variant=name))
    (args.out / "README.md").write_text("\n\n".join([HEAD, *sections]) + "\n", encoding="utf-8")
    pd.concat(tables).to_csv(args.out / "summary.csv", index=False, float_format="%.6g")
    print("\n\n".join(sections))


if __name__ == "__main__":
    main()
