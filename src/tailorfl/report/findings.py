"""The sentences at the top of a report: the main findings, and caveats on the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from tailorfl.core.method import all_methods
from tailorfl.evaluation.bootstrap import LEVEL as CLIENT_LEVEL
from tailorfl.evaluation.comparisons import LEVEL, Paired, holm, paired
from tailorfl.report.clients import ClientLine, clients_of
from tailorfl.report.columns import metric_name
from tailorfl.report.result import REFERENCES
from tailorfl.report.tables import LEAST_SEEDS, Table
from tailorfl.runs.fingerprint import forced

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

Means = Mapping[str, Mapping[tuple[int, str], float]]
"""Label -> {key that paired jobs share -> mean over clients}."""
MOST_NAMES = 3
"""Largest number of methods or clients that a sentence names."""
MOST_CLIENTS = 200
"""Largest number of clients with intervals in a sentence: each takes some hundredths of a second."""


@dataclass(frozen=True)
class Difference:
    """The mean over clients of one method minus that of another, over the seeds that both have.

    `adjusted` is the p-value of the paired t-test with Holm's correction for all pairs of the experiment; the interval
    and the p-value in `pair` are not corrected.
    """

    first: str
    second: str
    pair: Paired
    adjusted: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the corrected p-value is below the 5 % level."""
        return self.adjusted < LEVEL


def differences(means: Means) -> list[Difference]:
    """Return all pairs of methods that share a seed, in their order; `means` are those of `means_by_job`."""
    pairs = []
    for (a, first), (b, second) in combinations(means.items(), 2):
        common = sorted(first.keys() & second.keys())
        if common:
            pairs.append((a, b, paired([first[s] for s in common], [second[s] for s in common])))
    adjusted = holm([pair.p_value for _, _, pair in pairs])
    return [Difference(*pair, p) for pair, p in zip(pairs, adjusted, strict=True)]


def findings(result: ExperimentResult) -> list[str]:
    """Return the first sentences of a report: how methods differ, and which clients gain and lose."""
    means = result.means_by_job()
    return [sentence for sentence in (_of_methods(result, means), _of_clients(result, means)) if sentence]


def _of_methods(result: ExperimentResult, means: Means) -> str:
    """Return a sentence on differences of the mean over clients beyond noise, those to LocalTrain first."""
    name, averages = metric_name(result.metric), {label: fmean(row.values()) for label, row in means.items()}
    if len(averages) == 1:
        ((label, average),) = averages.items()
        number = result.columns[0].text(average)
        return f"Only {label} was run, so there is nothing to compare: {name} {number} on the average client."
    pairs = [_better_first(result, pair) for pair in differences(means) if not math.isnan(pair.pair.mean)]
    if not pairs:
        return f"No two methods have {name} with the same seed, so none can be compared."
    counts = sorted({pair.pair.seeds for pair in pairs})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else _count(counts[0], "seed")
    direction = ", lower is better" if result.lower_is_better else ""
    clauses = _clauses(result, sorted(pairs, key=lambda pair: -abs(pair.pair.mean)))
    if failed := [label for label, average in averages.items() if math.isnan(average)]:
        clauses.append(f"without {name}: {_listed(failed)}")
    return f"{name[:1].upper()}{name[1:]} on the average client ({seeds}{direction}): {'; '.join(clauses)}."


def _clauses(result: ExperimentResult, pairs: Sequence[Difference]) -> list[str]:
    """Return clauses about differences, which are sorted by size and have the better method first."""
    reference, tests = result.reference, [pair for pair in pairs if pair.pair.seeds >= LEAST_SEEDS]
    sure = [pair for pair in tests if pair.is_beyond_noise]
    if pairs[0].pair.mean == 0:
        return ["all methods are equal on average"]
    if not tests:
        return ["too few seeds to judge the noise", f"the largest difference, {_size(result, pairs[0])}"]
    if not sure and len(tests) == 1:
        return [f"the difference, {_size(result, tests[0])}, which is not beyond noise"]
    if not sure:
        none = f"none of {len(tests)} differences is beyond noise when all are tested together"
        return [none, f"the largest, {_size(result, tests[0])}"]
    clauses = []
    above = [(pair.first, pair) for pair in sure if pair.second == reference]
    below = [(pair.second, pair) for pair in sure if pair.first == reference]
    for named, word in ((above, "better"), (below, "worse")):
        if named:
            label, pair = named[0]
            verb, most = ("is", "") if len(named) == 1 else ("are", f", most {label}:")
            labels = _listed([label for label, _ in named])
            clauses.append(f"{labels} {verb} {word} than {reference}{most} by {_points(result, pair)}")
    remaining = len(tests) - len(above) - len(below)
    if further := [pair for pair in sure if reference not in (pair.first, pair.second)]:
        of_all = f"{len(further)} of {remaining} {'other ' * bool(clauses)}differences"
        verb = "is" if len(further) == 1 else "are"
        clauses += [f"{of_all} {verb} beyond noise", f"the largest, {_size(result, further[0])}"]
    elif remaining:
        clauses.append("no other difference is beyond noise")
    return clauses


def _of_clients(result: ExperimentResult, means: Means) -> str:
    """Return a sentence on the largest gain over LocalTrain with the best method on average, and on losses."""
    reference, sign = result.reference, -1.0 if result.lower_is_better else 1.0
    averages = {
        label: sign * average
        for label in {str(s["label"]): None for s in result.summaries if _federates(str(s["method"]))}
        if not math.isnan(average := fmean(means[label].values()))
    }
    if not averages:
        return ""
    if reference is None:
        return "Which clients gain is not known, since LocalTrain was not run (methods=local)."
    best = max(averages, key=averages.__getitem__)
    if not (common := sorted(means[best].keys() & means[reference].keys())):
        return ""
    are_few = max(int(s.get("clients", 0)) for s in result.summaries) <= MOST_CLIENTS
    report = clients_of(result, common[0][0], methods=[best], intervals=are_few)
    gains = [(sign * line.gain, line) for line in report.lines if line.gain is not None]
    if not gains:
        return ""
    most = max(gain for gain, _ in gains)
    first = [line for gain, line in gains if gain == most]
    size = _amount(result, most)
    if len(first) == 1 and (ends := first[0].gain_interval) is not None:
        size += f" [{', '.join(_amount(result, v, unit='') for v in sorted((sign * ends.low, sign * ends.high)))}]"
    gain = f"{_listed([line.name for line in first])} gain{'s' * (len(first) == 1)} most, {size}"
    of_seed = f" (seed {report.seed})" if len(report.seeds) > 1 else ""
    compared = f"With {best}{of_seed}, compared with {reference}"
    return f"{compared}, {gain if most > 0 else 'no client gains'}; {_losses(gains)}."


def _federates(method: str) -> bool:
    """Return whether a method federates: it neither pools all data nor trains every client alone."""
    known = all_methods().get(method)
    return method not in REFERENCES and not (known is not None and known.pooled)


def _losses(gains: Sequence[tuple[float, ClientLine]]) -> str:
    """Return a clause on the number of clients that lose, and those that lose beyond the noise of their test parts."""
    losing = [line for gain, line in gains if gain < 0]
    if not losing:
        return "no client loses"
    intervals = [(line.name, ends) for line in losing if (ends := line.gain_interval) is not None]
    lose = f"{len(losing)} of {_count(len(gains), 'client')} lose{'s' * (len(losing) == 1)}"
    if len(intervals) < len(losing):
        lose += f" (of {len(losing) - len(intervals)} the noise is not known)"
    if not intervals:
        return lose
    certain = [name for name, ends in intervals if ends.leaves_out_zero]
    if not certain:
        return f"{lose}, {'not' if len(losing) == 1 else 'none'} beyond the noise of the test part"
    chance = (1 - CLIENT_LEVEL) / 2 * sum(line.gain_interval is not None for _, line in gains)
    return f"{lose}, {_listed(certain)} beyond the noise of the test part (by chance: about {chance:.2g})"


def _better_first(result: ExperimentResult, pair: Difference) -> Difference:
    """Return a difference with the better method first."""
    if (pair.pair.mean < 0) == result.lower_is_better:
        return pair
    return replace(pair, first=pair.second, second=pair.first)


def _size(result: ExperimentResult, pair: Difference) -> str:
    return f"{pair.first} over {pair.second}, is {_points(result, pair)}"


def _points(result: ExperimentResult, pair: Difference) -> str:
    """Return the size of a difference, with the half width of its interval if there are enough seeds for one."""
    half_width = pair.pair.half_width if pair.pair.seeds >= LEAST_SEEDS else math.nan
    return _amount(result, abs(pair.pair.mean), half_width)


def _amount(result: ExperimentResult, value: float, spread: float = math.nan, unit: str = "points") -> str:
    """Return a value of the metric as in the table, with `unit` instead of a percent sign."""
    text = result.columns[0].text(value, spread)
    return f"{text.removesuffix(' %')} {unit}".rstrip() if text.endswith(" %") else text


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _listed(names: Sequence[str]) -> str:
    """Return names as running text; of many names only the first few."""
    words = [*names[:MOST_NAMES], *([f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else [])]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def caveats(result: ExperimentResult) -> list[Table]:
    """Return tables of caveats on the numbers; empty if there are none."""
    malicious, rejected, grown = [], [], []
    for summary in result.summaries:
        job = f"{summary['label']}, seed {summary['seed']}"
        if attack := summary.get("malicious"):
            malicious.append((job, attack["kind"], ", ".join(attack["clients"])))
        for client, rounds in (summary.get("rejected_clients") or {}).items():
            rejected.append((job, client, str(len(rounds)), ", ".join(map(str, rounds[:20]))))
        if summary.get("loss_grew"):
            grown.append((job, *(f"{loss:.3g}" for loss in summary["loss_grew"])))
    tables = [
        Table.of(
            "Not in the table",
            ("Job",),
            [(reason,) for reason in result.missing],
            "These jobs of the experiment are not in the table; if only some seeds of a method are missing, its means "
            "are over the others.",
        ),
        Table.of(
            "Resumed by force",
            ("Difference",),
            [(line,) for folder in result.folders for line in forced(folder)],
            "The table mixes results of different settings, data or versions: the experiment was resumed with --force.",
        ),
        Table.of(
            "Not the same experiment",
            ("Folder", "What differs"),
            result.unlike,
            f"The table merges several folders, and not all of them match '{result.folders[0]}': a method with other "
            "settings, data or versions has a separate line, and such lines cannot be compared fairly.",
        ),
        Table.of(
            "Malicious clients",
            ("Job", "Attack", "Clients"),
            malicious,
            "All numbers are for the other clients and their test data; the malicious clients' models, on their own "
            "test data, are the separate set malicious.",
        ),
        Table.of(
            "Rejected updates",
            ("Job", "Client", "Rejected updates", "Rounds"),
            rejected,
            "Updates that were NaN or infinite were ignored, and the client kept its previous state.",
        ),
        Table.of(
            "Diverged",
            ("Job", "First loss", "Last loss"),
            grown,
            "The training loss ended far above that of guessing, or without classes far above its first value: these "
            "rows say nothing about their methods.",
        ),
    ]
    return [table for table in tables if table.rows]
