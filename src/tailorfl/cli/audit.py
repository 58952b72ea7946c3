"""The command `tailorfl audit`: an attack on private training, and whether it beats the stated ε."""

from __future__ import annotations

from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from tailorfl.cli.listing import AsJson
from tailorfl.cli.screen import PROSE, print_json, show_table, stdout
from tailorfl.errors import unknown


def command(
    noise: Annotated[float, typer.Option("--noise", help="sigma, in units of the clip.")] = 1.0,
    clip: Annotated[float, typer.Option("--clip", help="Largest norm of a sample's gradient.")] = 1.0,
    samples: Annotated[int, typer.Option("--samples", help="Of a client.")] = 20,
    batch: Annotated[int, typer.Option("--batch", help="Samples of a batch.")] = 10,
    steps: Annotated[int, typer.Option("--steps", help="Batches that a client trains on.")] = 5,
    sampling: Annotated[str, typer.Option("--sampling", help="poisson or shuffle.")] = "poisson",
    trials: Annotated[
        int, typer.Option("--trials", help="Trainings with the canary, and as many without.")
    ] = 2000,
    delta: Annotated[float, typer.Option("--delta", help="Of (epsilon, delta)-privacy.")] = 1e-5,
    seed: Annotated[int, typer.Option("--seed", help="Of batches and noise.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack private training with a canary; exits with 1 if that tells more than the stated epsilon allows."""
    from tailorfl.experiments.audit import audit_samples
    from tailorfl.settings.privacy import BatchSampling
    from tailorfl.training.sample_privacy import SampleDP

    if sampling not in get_args(BatchSampling):
        raise unknown("sampling", sampling, get_args(BatchSampling))
    dp = SampleDP(clip, noise, cast(BatchSampling, sampling))
    given = {"samples": samples, "batch_size": batch, "steps": steps, "trials": trials}
    found = audit_samples(dp, **given, delta=delta, seed=seed)
    if as_json:
        attack = found.attack
        print_json(
            {
                "delta": delta,
                "stated": found.stated,
                "at_least": found.shown,
                "confidence": found.confidence,
                "trials": attack.trials,
                "hits": attack.hits,
                "false_alarms": attack.false_alarms,
                "broken": found.broken,
            }
        )
    else:
        table = Table(title=f"Samples, neighbours zero-out, delta {delta:g}", show_header=False)
        table.add_column(style="bold", ratio=PROSE)
        table.add_column(justify="right")
        table.add_row("stated epsilon", f"{found.stated:.4g}")
        table.add_row(f"epsilon is at least ({found.confidence:.0%} confidence)", f"{found.shown:.4g}")
        table.add_row(
            "runs with the canary, of which told", f"{found.attack.trials:,}, {found.attack.hits:,}"
        )
        table.add_row(
            "runs without it, of which told", f"{found.attack.trials:,}, {found.attack.false_alarms:,}"
        )
        show_table(stdout(), table)
    if found.broken:
        Console(stderr=True).print("broken: the attack tells more than the stated epsilon allows")
        raise typer.Exit(1)
