"""What a report says before anyone reads its table: what is missing in it, mixed, rejected or diverged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailorfl.report.tables import Table
from tailorfl.runs.fingerprint import forced

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult


def caveats(result: ExperimentResult) -> list[Table]:
    """Return a table for everything that makes numbers other than they look; none where all is well."""
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
            "These jobs of the experiment are not in the table; means are over fewer seeds where only some are.",
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
            f"The table is put together from several folders, and not all of them are like '{result.folders[0]}': "
            "lines of the same method with other settings, data or versions stand apart, and are no fair comparison "
            "with each other.",
        ),
        Table.of(
            "Malicious clients",
            ("Job", "Attack", "Clients"),
            malicious,
            "All numbers are of the other clients and of their test data; models of the malicious ones, on their own "
            "test data, stand apart as the set malicious.",
        ),
        Table.of(
            "Rejected updates",
            ("Job", "Client", "Rejected updates", "Rounds"),
            rejected,
            "Updates that were NaN or infinite counted for nothing, and the client kept its state of before.",
        ),
        Table.of(
            "Diverged",
            ("Job", "First loss", "Last loss"),
            grown,
            "The training loss ended far above its first value: these rows say nothing about their methods.",
        ),
    ]
    return [table for table in tables if table.rows]
