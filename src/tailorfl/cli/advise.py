"""The command `tailorfl advise`: what a pilot shows of a federation, and the settings that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import Imports, Quiet, experiment, like_run
from tailorfl.cli.screen import PROSE, print_json, say, show_table, status, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.theory.advice import Advice
    from tailorfl.theory.spread import SpreadInterval

PUBLIC = ("perada", "perfed_ckt")
"""Methods that train on a public set too."""
LEAST_ROUNDS, MOST_ROUNDS = 10, 50
"""Of averaging in a pilot, where nobody says how many."""
SHOWN = 10
"""Clients in PerFed-CKT's table; --json has all."""


def command(
    arguments: Annotated[list[str] | None, like_run("its methods are not used")] = None,
    clients: Annotated[int, typer.Option("--clients", help="Clients in the pilot, at most.")] = 30,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            help="Rounds of averaging before clients are compared (not for convex); by default the experiment's, "
            "10 at least and 50 at most.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train a cheap pilot; measure R, V, rho, L and mu, and print the lam, step sizes and rounds that follow."""
    config = experiment(arguments)
    with status(quiet, "pilot", lines=True) as watch:
        advice = pilot(config, clients, rounds, watch)
    if as_json:
        print_json({**advice.to_dict(), "config": fragment(advice, config)})
    else:
        show(stdout(), config, advice)


def pilot(config: ExperimentConfig, clients: int, rounds: int | None, watch: Callable[[str], None]) -> Advice:
    """Advice for an experiment's data, model and training, with its first seed.

    `rounds` of averaging come before clients are compared; None takes the experiment's, between `LEAST_ROUNDS`
    and `MOST_ROUNDS`: one model for all catches up late, so that a shorter pilot finds clients further apart than the
    experiment does, and a pilot of few rounds measures first steps.

    Raises:
        TailorflError: the experiment or its data cannot be used; the message says why.
    """
    import torch

    from tailorfl.runs.build import check, make_federation, make_simulation
    from tailorfl.runs.job import Job
    from tailorfl.settings.experiment import MethodConfig
    from tailorfl.theory.advisor import advise

    check(config)
    if config.variants:
        raise ConfigError(
            f"'{config.name}' has variants ({', '.join(config.variants)}), each a federation or training of its "
            "own; advise on one: give its settings as KEY=VALUE beside variants={}"
        )
    if config.model.larger:
        raise ConfigError("the pilot compares weights, so it needs one architecture; leave out model.larger")
    rounds = min(max(config.rounds, LEAST_ROUNDS), MOST_ROUNDS) if rounds is None else rounds
    torch.set_num_threads(config.threads)
    seed = config.seeds[0]
    federation = make_federation(config, config.data.seed_of(seed))
    # FedAvg trains the whole model with the experiment's own settings (equal weights go with any privacy); it is
    # built, not run.
    fedavg = MethodConfig(name="fedavg", label="fedavg", options={"weights": "uniform"})
    sim = make_simulation(Job(config, fedavg, seed), federation)
    return advise(
        federation, sim.model.whole, sim.train, clients=clients, rounds=rounds, seed=seed, watch=watch
    )


def fragment(advice: Advice, config: ExperimentConfig) -> dict[str, Any]:
    """`{"methods": [...]}` of the methods that there are; without a public set, of those that need none."""
    from tailorfl.core.method import methods

    usable = set(methods()) - (set() if config.data.public is not None else set(PUBLIC))
    return {"methods": [row for row in advice.to_config()["methods"] if row["name"] in usable]}


def show(console: Console, config: ExperimentConfig, advice: Advice) -> None:
    """Print an advice: measurements, confidence, settings, PerFed-CKT's weights, doubts, and YAML to paste."""
    show_table(console, _seen(config.name, advice))
    console.print(f"confidence: [bold]{advice.confidence}[/]", highlight=False)
    show_table(console, _methods(advice))
    show_table(console, _transfer(advice))
    for note in advice.notes:
        say(console, f"note: {note}")
    console.print("\nto be pasted into an experiment:", highlight=False)
    text = _yaml(fragment(advice, config), console.width)
    console.print(Text(text), highlight=False, soft_wrap=True, end="")


def _yaml(value: Any, width: int) -> str:
    """YAML whose lines are no longer than `width` where that can be; the package breaks lines once they are."""
    import yaml

    for wanted in range(width, 10, -5):
        text = str(yaml.safe_dump(value, sort_keys=False, width=wanted, default_flow_style=None))
        if max(map(len, text.splitlines())) <= width:
            break
    return text


def _seen(name: str, advice: Advice) -> Table:
    facts, curved = advice.facts, advice.facts.curvature
    way = "optima of halves" if facts.mode == "optimum" else "local training of halves"
    title = f"{name}: {way}, {facts.used} of {facts.clients} clients, {facts.seconds:.1f} s"
    table = Table(title=Text(title))
    table.add_column("", ratio=PROSE)
    for column in ("estimate", "90 % range"):
        table.add_column(column, justify="right")

    def add(text: str, value: float | SpreadInterval) -> None:
        if isinstance(value, int | float):
            table.add_row(text, _number(value), "")
        else:
            table.add_row(text, _number(value.value), f"{_number(value.low)} to {_number(value.high)}")

    add("clients N", facts.clients)
    add("samples of a client n (harmonic mean)", facts.samples)
    add("samples of all clients", facts.total_samples)
    add("weights d", facts.dim)
    add("heterogeneity R", facts.radius)
    add("squared error of training alone V", facts.noise)
    add("  of one model for all V/N + R^2", advice.errors.pooled)
    add("  of the best pull", advice.errors.coupled)
    add("gradient noise rho", facts.rho)
    add("smoothness L, all clients together", curved.smoothness)
    add("  largest of a client", curved.client_smoothness)
    add("strong convexity mu, all clients together", curved.mu)
    add("  smallest of a client", curved.client_mu)
    add("loss saved by own models, unseen samples", facts.gain)
    add("best pull lam", advice.lam)
    if advice.corollary is not None:
        found = advice.corollary
        edge = f"at least {_number(found.lower)}" if found.together else f"at most {_number(found.upper)}"
        table.add_row("  by FedCLUP's Corollary 1", edge, "")
    return table


def _methods(advice: Advice) -> Table:
    table = Table(title="settings")
    for column in ("method", "settings", "training", "rounds", "why"):
        words = PROSE if column in ("settings", "training", "why") else None
        table.add_column(column, justify="right" if column == "rounds" else "left", ratio=words)
    for found in advice.recommendations:
        rounds = "" if found.rounds is None else f"{found.rounds:,}"
        table.add_row(found.method, _pairs(found.options), _pairs(found.train), rounds, Text(found.why))
    return table


def _transfer(advice: Advice) -> Table:
    found = advice.transfer
    table = Table(title="PerFed-CKT (Theorem 4.2)")
    for column in ("client", "spread v_k", "lam_k", "weight alpha_k", "keeps of its own"):
        table.add_column(column, justify="left" if column == "client" else "right")
    columns = (found.v2, found.lam, found.alpha, found.own_weight)
    for name, v2, *rest in list(zip(found.clients, *columns, strict=True))[:SHOWN]:
        table.add_row(Text(name), _number(math.sqrt(v2)), *map(_number, rest))
    if len(found.clients) > SHOWN:
        table.caption = f"{len(found.clients) - SHOWN} more clients in --json"
    return table


def _pairs(values: Any) -> Text:
    return Text(" ".join(f"{key}={value}" for key, value in values.items()))


def _number(value: float) -> str:
    """Return a count with commas, any other number with three digits; what has no meaning is said so."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not meaningful"
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"
