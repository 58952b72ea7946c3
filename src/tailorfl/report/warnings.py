"""What a report says before anyone reads its table: what is missing in it, mixed, rejected or diverged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.report.curves import Section
from tailorfl.runs.fingerprint import forced

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult


def caveats(result: ExperimentResult) -> list[Section]:
    """Return a section for everything that makes numbers of the table other than they look; none where all is well."""
    return [
        *_missing(result),
        *_forced(result.folders),
        *_unlike(result),
        *_malicious(result),
        *_trouble(result),
    ]


def _unlike(result: ExperimentResult) -> list[Section]:
    """How the experiments of several folders differ, where they do."""
    if not result.unlike:
        return []
    note = (
        f"The table is put together from several folders, and not all of them are like '{result.folders[0]}': lines of "
        "the same method with other settings, data or versions stand apart, and are no fair comparison with each other."
    )
    return [Section("Not the same experiment", note, ("Folder", "What differs"), tuple(result.unlike))]


def _forced(folders: Sequence[Path]) -> list[Section]:
    """Return what was different when the experiment was resumed by force, if it was."""
    differences = [line for folder in folders for line in forced(folder)]
    if not differences:
        return []
    note = "The table mixes results of different settings, data or versions: the experiment was resumed with --force."
    return [Section("Resumed by force", note, ("Difference",), tuple((d,) for d in differences))]


def _missing(result: ExperimentResult) -> list[Section]:
    """Return the jobs that are not in the table, and why."""
    if not result.missing:
        return []
    note = (
        "These jobs of the experiment are not in the table; means are over fewer seeds where only some are."
    )
    return [Section("Not in the table", note, ("Job",), tuple((m,) for m in result.missing))]


def _malicious(result: ExperimentResult) -> list[Section]:
    """Who worked against the others in each job, where somebody did."""
    rows = []
    for summary, _ in result.jobs:
        found = summary.get("malicious")
        if found:
            job = f"{summary['label']}, seed {summary['seed']}"
            rows.append((job, found["kind"], ", ".join(found["clients"])))
    if not rows:
        return []
    note = (
        "All numbers are of the other clients and of their test data; models of the malicious ones, on their own test "
        "data, stand apart as the set malicious."
    )
    return [Section("Malicious clients", note, ("Job", "Attack", "Clients"), tuple(rows))]


def _trouble(result: ExperimentResult) -> list[Section]:
    """Clients whose updates were rejected, and jobs whose training loss grew."""
    rejected, grown = [], []
    for summary, _ in result.jobs:
        job = f"{summary['label']}, seed {summary['seed']}"
        for client, rounds in (summary.get("rejected_clients") or {}).items():
            rejected.append((job, client, str(len(rounds)), ", ".join(map(str, rounds[:20]))))
        if summary.get("loss_grew"):
            first, last = summary["loss_grew"]
            grown.append((job, f"{first:.3g}", f"{last:.3g}"))
    out = []
    if rejected:
        note = (
            "Updates that were NaN or infinite counted for nothing, and the client kept its state of before."
        )
        head = ("Job", "Client", "Rejected updates", "Rounds")
        out.append(Section("Rejected updates", note, head, tuple(rejected)))
    if grown:
        note = (
            "The training loss ended far above its first value: these rows say nothing about their methods."
        )
        out.append(Section("Diverged", note, ("Job", "First loss", "Last loss"), tuple(grown)))
    return out
