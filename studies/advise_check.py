"""Do the numbers of `tailorfl advise` say what comparisons then showed? Their regime beside the tables of results/.

    python -m studies.advise_check pilots results/advise              the regimes: advice.csv, in minutes
    python -m studies.advise_check seeds results/advise FOLDER ...    numbers of every seed: seeds.csv
    python -m studies.advise_check table results/advise               the verdicts, on the screen

`pilots` runs the pilot of `tailorfl advise` (30 clients, the first seed) with the settings of every
folder of results/ whose comparison.csv has LocalTrain, FedAvg and a personalized method. Of each of the three the line
with the best mean is judged. A committed table has no numbers of single seeds, so `seeds` runs these three lines of a
folder again (`--personal 3`: the three best personalized ones), and their numbers are judged. Where that was not done,
and results/evidence has none either, the intervals of both means are put together as if they were independent, which is
too wide where seeds move both alike.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from studies.claims.folders import gathered
from tailorfl.cli.advice import pilot
from tailorfl.core.method import find_method
from tailorfl.errors import TailorflError
from tailorfl.evaluation.comparisons import interval
from tailorfl.evaluation.leading import leading
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import REFERENCES
from tailorfl.runs.build import make_federation
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import expand, load
from tailorfl.settings.names import slug
from tailorfl.theory.advisor import Facts

RESULTS = Path(__file__).resolve().parents[1] / "results"
KINDS = ("local", "personal", "global")
MINUTES = 40.0
"""Of one core, for all pilots; federations that are left then are named."""
Seeds = Mapping[str, Mapping[int, float]]
"""Label -> seed -> mean over clients."""


@dataclass(frozen=True)
class Line:
    """A line of a table: its label, its mean and the half width of the 95 % interval over seeds."""

    label: str
    mean: float
    half: float


@dataclass(frozen=True)
class Row:
    """A federation: what was advised, and which of the three its table has ahead."""

    name: str
    advised: str
    sure: bool
    lines: Mapping[str, Line]
    best: tuple[str, ...]
    paired: bool

    @property
    def verdict(self) -> str:
        """`hit`, `miss`, or `open` where what was advised is one of several that no interval tells apart."""
        if self.advised not in self.best:
            return "miss"
        return "hit" if len(self.best) == 1 else "open"


def lines(table: pd.DataFrame, lower: bool) -> Mapping[str, Line] | None:
    """Return local, personal and global -> its line with the best mean; None where one of the three is missing.

    Args:
        table: comparison.csv, with the columns label, method, mean and mean_ci.
        lower: whether smaller means are better.
    """
    kind = [
        "local"
        if method in REFERENCES
        else "global"
        if method == "fedavg"
        else "personal"
        if find_method(method).has_personal
        else ""
        for method in table["method"]
    ]
    found: dict[str, Line] = {}
    for row in table.assign(kind=kind).sort_values("mean", ascending=lower, kind="stable").to_dict("records"):
        if row["kind"] and not math.isnan(row["mean"]):
            found.setdefault(row["kind"], Line(row["label"], row["mean"], row["mean_ci"]))
    return found if len(found) == len(KINDS) else None


def best(found: Mapping[str, Line], lower: bool, seeds: Seeds | None = None) -> tuple[str, ...]:
    """Return the best of the three, and those that are not behind it beyond the 95 % interval of the difference.

    Args:
        found: see `lines`.
        lower: whether smaller means are better.
        seeds: numbers of every seed, which make the interval a paired one.
    """
    sign = -1.0 if lower else 1.0
    top = max(KINDS, key=lambda kind: sign * found[kind].mean)
    near = {top}
    for kind in KINDS:
        behind = sign * (found[top].mean - found[kind].mean)
        error = math.hypot(found[top].half, found[kind].half)
        if seeds is not None:
            ours, theirs = seeds[found[top].label], seeds[found[kind].label]
            behind, error = interval(
                [sign * (ours[s] - theirs[s]) for s in sorted(ours.keys() & theirs.keys())]
            )
        if not behind > error:  # one seed has no interval, and tells nothing apart
            near.add(kind)
    return tuple(kind for kind in KINDS if kind in near)


def federations() -> Iterator[tuple[str, ExperimentConfig, pd.DataFrame]]:
    """Yield (folder, its settings, its table) of the comparisons that have all three kinds of lines."""
    for file in sorted(RESULTS.rglob("comparison.csv")):
        folder, found = file.parent, pd.read_csv(file)
        if lines(found, lower=False) is None:
            continue
        if (folder / "config.yaml").is_file():
            config = load(folder / "config.yaml")
        else:
            variants = expand(load(folder.parent / "config.yaml"))
            config = next(one for name, one in variants.items() if slug(name) == folder.name)
        yield folder.relative_to(RESULTS).as_posix(), config, found


def metric(name: str) -> str | None:
    """Return the metric that leads in a folder's table, by the head of its report; None without a report."""
    file = RESULTS / name / "report.md"
    head = (
        re.search(r"\| Seeds \| (.+?) \(mean\)", file.read_text(encoding="utf-8")) if file.is_file() else None
    )
    return None if head is None else head[1].replace(" ", "_")


def regime(facts: Facts) -> str:
    """Return which kind the minimax theorem has ahead, with R in units of V: global up to V/N, local above V."""
    if facts.radius2 > facts.noise.value:
        return "local"
    return "personal" if facts.radius2 > facts.noise.value / facts.clients else "global"


def pilots(out: Path, folders: Sequence[str]) -> None:
    """Write advice.csv: a row for each federation, with what the advice rests on, or why there is none.

    Where `folders` are named, only theirs are made anew.
    """
    file, begin = out / "advice.csv", time.process_time()
    rows: list[dict[Hashable, Any]] = []
    if folders:
        rows = pd.read_csv(file).query("folder not in @folders").to_dict("records")
    for name, config, _ in federations():
        if folders and name not in folders:
            continue
        row: dict[Hashable, Any] = {"folder": name}
        try:
            if time.process_time() - begin > 60 * MINUTES:
                raise TailorflError(f"{MINUTES:g} minutes of a core were over")
            federation = make_federation(config, config.data.seed_of(config.seeds[0]))
            row["lower"] = leading(federation.source, metric(name) or config.eval.metric) in LOWER_IS_BETTER
            advice = pilot(config, 30, None, lambda _: None)
            facts = advice.facts
            row["advised"] = regime(facts)
            row |= {"mode": facts.mode, "samples": facts.samples, "R2": facts.radius2, "V": facts.noise.value}
            row |= {"gain": facts.gain.value, "gain_low": facts.gain.low, "gain_high": facts.gain.high}
        except TailorflError as error:
            row["why_not"] = str(error).split(";")[0]
        rows.append(row)
        print(*row.values(), f"{time.process_time() - begin:.0f} s", flush=True)
        frame = pd.DataFrame(rows).sort_values("folder", kind="stable")
        frame.to_csv(file, index=False, float_format="%.4g")


def rerun(out: Path, folders: Sequence[str], personal: int) -> None:
    """Run lines of each folder again and add the numbers of their seeds to seeds.csv.

    Args:
        out: folder of advice.csv and seeds.csv.
        folders: folders of results/.
        personal: how many personalized lines, the best of the table first, beside LocalTrain and FedAvg.
    """
    advice = pd.read_csv(out / "advice.csv").set_index("folder")
    for name, config, committed in federations():
        if name not in folders:
            continue
        left, labels = committed, list[str]()
        for _ in range(personal):
            found = lines(left, bool(advice["lower"][name]))
            if found is not None:
                labels += [line.label for line in found.values()]
                left = left[left["label"] != found["personal"].label]
        plain: dict[str, object] = {"methods": [m for m in config.methods if m.label in labels]}
        plain |= {"published": {}, "search": {}}
        plain["eval"] = config.eval.model_copy(update={"metric": metric(name) or config.eval.metric})
        with tempfile.TemporaryDirectory() as place:
            numbers = run_experiment(config.model_copy(update=plain), Path(place) / "run").means_by_job()
        rows = [
            {"folder": name, "label": label, "seed": seed, "mean": mean}
            for label, means in numbers.items()
            for (seed, _), mean in means.items()
        ]
        file = out / "seeds.csv"
        before = [pd.read_csv(file).query("folder != @name")] if file.is_file() else []
        after = pd.concat([*before, pd.DataFrame(rows)]).sort_values("folder", kind="stable")
        after.to_csv(file, index=False, float_format="%.6f")
        for label, means in numbers.items():
            was = committed.set_index("label")["mean"][label]
            now = sum(means.values()) / len(means)
            print(f"{name}: {label} {now:.4f}, in the table {was:.4f}", flush=True)


def kept(out: Path, name: str, labels: Sequence[str]) -> Seeds:
    """Return the numbers of every seed of the lines that were run again, or kept as evidence of the recipe."""
    if (out / "seeds.csv").is_file():
        frame = pd.read_csv(out / "seeds.csv")
        mine = frame[frame["folder"] == name]
        if not mine.empty:
            return {
                str(label): dict(zip(part["seed"].tolist(), part["mean"].tolist(), strict=True))
                for label, part in mine.groupby("label")
            }
    for one in gathered([RESULTS / "evidence"]):
        if one.recipe == name:
            return {label: one.of(label, "", "mean") for label in labels}
    return {}


def judge(
    committed: pd.DataFrame, seeds: Seeds, lower: bool
) -> tuple[Mapping[str, Line], tuple[str, ...], bool]:
    """Return the lines that are judged, the best of them, and whether by seeds: those of `seeds`, else the table's."""
    again = committed[[bool(seeds.get(label)) for label in committed["label"]]].copy()
    numbers = [interval(list(seeds[label].values())) for label in again["label"]]
    again["mean"], again["mean_ci"] = [mean for mean, _ in numbers], [half for _, half in numbers]
    found = lines(again, lower) if len(again) else None
    if found is not None:
        return found, best(found, lower, seeds), True
    found = lines(committed, lower) or {}
    return found, best(found, lower), False


def judged(out: Path) -> list[Row]:
    """Return the rows of the federations that have an advice."""
    advice = pd.read_csv(out / "advice.csv").dropna(subset="advised").set_index("folder")
    rows = []
    for name, _, committed in federations():
        if name in advice.index:
            said = advice.loc[name]
            seeds = kept(out, name, list(committed["label"]))
            found, near, paired = judge(committed, seeds, str(said["lower"]) == "True")
            rows.append(Row(name, str(said["advised"]), str(said["sure"]) == "True", found, near, paired))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of verdicts, and below it the counts."""
    out = [
        "| Federation | Advised | LocalTrain | Personal | Global | Best | |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        said = [f"{line.mean:.4f} ± {line.half:.4f}" for line in (row.lines[kind] for kind in KINDS)]
        said[1] = f"{row.lines['personal'].label} {said[1]}"
        advised = row.advised + ("" if row.sure else " (not sure)")
        cells = (row.name + " *" * row.paired, advised, *said, " or ".join(row.best), row.verdict)
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, "", counts(rows)]) + "\n"


def counts(rows: Sequence[Row]) -> str:
    """Return the sentence that counts verdicts, beside what always saying the same would have had."""
    said = {word: sum(row.verdict == word for row in rows) for word in ("hit", "miss", "open")}
    sure = [row for row in rows if row.sure]
    always = (
        f"always {kind} {sum(row.best == (kind,) for row in rows)} and {sum(kind not in row.best for row in rows)}"
        for kind in KINDS
    )
    return (
        f"{len(rows)} federations: {said['hit']} hits, {said['miss']} misses, {said['open']} open. Of {len(sure)} "
        f"advices that call themselves sure {sum(row.verdict == 'hit' for row in sure)} hit and "
        f"{sum(row.verdict == 'miss' for row in sure)} miss. Hits and misses of one answer for all:"
        f" {', '.join(always)}."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("pilots", "seeds", "table"))
    parser.add_argument("out", type=Path, help="folder of advice.csv and seeds.csv")
    parser.add_argument("folders", nargs="*", help="folders of results/; pilots: all unless named")
    parser.add_argument("--personal", type=int, default=1, help="personalized lines to be run again")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "pilots":
        pilots(given.out, given.folders)
    elif given.what == "seeds":
        rerun(given.out, given.folders, given.personal)
    else:
        print(table(judged(given.out)), end="")
