"""The field at equal tuning, as one page: gains over training alone, worst clients and bytes.

    tailorfl report runs/field_heart runs/field_domains runs/field_classes runs/field_dirichlet -o results/field
    python studies/field_tables.py runs/field_heart runs/field_domains runs/field_classes runs/field_dirichlet \
        --out results/field

writes field.md: for every federation and method the difference to LocalTrain in the metric that leads there, in points,
paired by seed, with Holm's correction over the methods of the federation, and whether the best of the federation beats
it beyond the noise; the same differences of the worst tenth of the clients; and what all clients sent and received.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailorfl.evaluation.comparisons import Paired, holm, interval, paired
from tailorfl.report.result import ExperimentResult

ALONE = "LocalTrain"
LEVEL = 0.05
Seeds = dict[int, float]


@dataclass(frozen=True)
class Federation:
    """What the methods made on one federation: points by label and seed, of all clients and of the worst tenth."""

    metric: str
    mean: Mapping[str, Seeds]
    worst: Mapping[str, Seeds]
    kilobytes: Mapping[str, Seeds]
    """Sent and received in all rounds, by all clients."""

    @property
    def methods(self) -> list[str]:
        """Return the labels of the methods."""
        return list(self.mean)


def federation(result: ExperimentResult) -> Federation:
    """Return the numbers of the metric that leads."""
    mean: dict[str, Seeds] = {}
    worst: dict[str, Seeds] = {}
    sent: dict[str, Seeds] = {}
    for summary, _ in result.jobs:
        label, seed = str(summary["label"]), int(summary["seed"])
        mean.setdefault(label, {})[seed] = 100 * summary["metrics"]["mean"]
        worst.setdefault(label, {})[seed] = 100 * summary["metrics"]["worst10"]
        sent.setdefault(label, {})[seed] = (summary["bytes_up"] + summary["bytes_down"]) / 1000
    return Federation(result.metric, mean, worst, sent)


def against(found: Mapping[str, Seeds], other: str) -> dict[str, Paired]:
    """Return every other method's difference to `other` on the seeds of both, and p after Holm's correction."""
    base = found[other]
    pairs = {}
    for label, seeds in found.items():
        if label != other:
            shared = sorted(set(seeds) & set(base))
            pairs[label] = paired([seeds[s] for s in shared], [base[s] for s in shared])
    corrected = holm([p.p_value for p in pairs.values()])
    return {
        label: Paired(p.mean, p.half_width, q, p.seeds)
        for (label, p), q in zip(pairs.items(), corrected, strict=True)
    }


def unbeaten(found: Mapping[str, Seeds]) -> list[str]:
    """Return the methods from which the best mean differs by less than the 95 % interval of the paired difference."""
    best = max(found, key=lambda label: interval(list(found[label].values()))[0])
    gaps = against(found, best)
    return [label for label in found if label == best or not -gaps[label].mean > gaps[label].half_width]


def page(field: Mapping[str, Federation]) -> str:
    """Return the page as Markdown."""
    methods = list(dict.fromkeys(label for one in field.values() for label in one.methods))
    seeds = max(len(s) for one in field.values() for s in one.mean.values())
    lines = [
        "# The field at equal tuning",
        "",
        f"Difference to {ALONE} in points of the metric that leads (its own mean in the first row), mean of {seeds} "
        "seeds ± half width of the 95 % interval of the paired differences; bold where p < 0.05 after Holm's "
        "correction over the methods of the column. ° marks methods that the best of the column does not beat "
        "beyond the interval of their difference.",
        "",
        *_table(methods, {name: one.mean for name, one in field.items()}, field, marked=True),
        "",
        "## Worst tenth of the clients",
        "",
        "The same of the mean over the lowest tenth of the clients; one client where there are ten or fewer.",
        "",
        *_table(methods, {name: one.worst for name, one in field.items()}, field, marked=False),
        "",
        "## Traffic",
        "",
        "Sent and received by all clients in all rounds, kB, mean over seeds.",
        "",
        f"| Method | {' | '.join(field)} |",
        f"| --- |{' ---: |' * len(field)}",
    ]
    for label in methods:
        cells = [_number(one.kilobytes.get(label)) for one in field.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _table(
    methods: Sequence[str],
    columns: Mapping[str, Mapping[str, Seeds]],
    field: Mapping[str, Federation],
    *,
    marked: bool,
) -> list[str]:
    heads = [f"{name}, {field[name].metric.replace('_', ' ')}" for name in columns]
    lines = [f"| Method | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    gains = {name: against(found, ALONE) for name, found in columns.items()}
    best = {name: unbeaten(found) if marked else [] for name, found in columns.items()}
    for label in methods:
        cells = []
        for name, found in columns.items():
            mark = "°" if label in best[name] else ""
            if label == ALONE:
                mean, half = interval(list(found[label].values()))
                cells.append(f"{mean:.1f} ± {half:.1f}{mark}")
            elif label not in found:
                cells.append("–")
            else:
                gain = gains[name][label]
                text = f"{gain.mean:+.1f} ± {gain.half_width:.1f}"
                cells.append((f"**{text}**" if gain.p_value < LEVEL else text) + mark)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _number(seeds: Seeds | None) -> str:
    return "–" if seeds is None else f"{interval(list(seeds.values()))[0]:,.0f}"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folders", type=Path, nargs="+", help="of finished comparisons, each with a line LocalTrain"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of field.md")
    given = parser.parse_args()
    field = {folder.name: federation(ExperimentResult.load(folder)) for folder in given.folders}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "field.md").write_text(page(field), encoding="utf-8")


if __name__ == "__main__":
    main()
