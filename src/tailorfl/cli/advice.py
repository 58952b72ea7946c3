"""The commands `tailorfl advise` and `bench`: short measurements, and the settings that follow from them.

`advise` trains a pilot, and measures the quantities that determine how much personalization pays; `bench` times a round
as a plain loop and with every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import Arguments, AsJson, Imports, Quiet, experiment, without_variants
from tailorfl.cli.screen import make_table, print_json, remark, say, show_table, status, stdout
from tailorfl.errors import ConfigError
from tailorfl.runs.process import import_tensordict

if TYPE_CHECKING:
    from tailorfl.benchmark.result import Bench, Way
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.theory.advisor import Advice
    from tailorfl.theory.spread import SpreadInterval


LEAST_ROUNDS, MOST_ROUNDS = 10, 50
"""Smallest and largest default number of averaging rounds in a pilot."""
SHOWN = 10
"""Largest number of clients in PerFed-CKT's table; --json has all."""


def advise_command(
    arguments: Arguments = None,
    clients: int = 30,
    rounds: int | None = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train a cheap pilot; measure R, V, rho, L and mu, and print the lam, step sizes and rounds that follow.

    Args:
        arguments: An experiment as for `tailorfl run`; its methods are not used.
        clients: Largest number of clients in the pilot.
        rounds: Rounds of averaging before clients are compared (not for convex); by default the experiment's, at least
            10 and at most 50.
    """
    config = experiment(arguments)
    with status(quiet, "pilot", lines=True) as watch:
        advice = pilot(config, clients, rounds, watch)
    if as_json:
        print_json({**advice.to_dict(), "config": fragment(advice, config)})
    else:
        show_advice(stdout(), config, advice)


def pilot(config: ExperimentConfig, clients: int, rounds: int | None, watch: Callable[[str], None]) -> Advice:
    """Return advice for an experiment's data, model and training, with its first seed.

    Clients are compared after `rounds` of averaging; None takes the experiment's, between `LEAST_ROUNDS` and
    `MOST_ROUNDS`. A common model catches up late, so a shorter pilot finds clients further apart than the experiment
    does, and a pilot of few rounds measures only the first steps.

    Raises:
        TailorflError: the experiment or its data cannot be used; the message says why.
    """
    import torch

    from tailorfl.runs.build import check, make_federation, make_simulation
    from tailorfl.runs.job import Job
    from tailorfl.settings.experiment import MethodConfig
    from tailorfl.theory.advisor import advise

    check(config)
    without_variants(config, "each a separate federation or training", "advise on")
    if config.model.larger:
        raise ConfigError("the pilot compares weights, so it needs one architecture; leave out model.larger")
    rounds = min(max(config.rounds, LEAST_ROUNDS), MOST_ROUNDS) if rounds is None else rounds
    torch.set_num_threads(config.threads)
    seed = config.seeds[0]
    federation = make_federation(config, config.data.seed_of(seed))
    # FedAvg trains the whole model with the experiment's settings (equal weights work with any privacy); it is built,
    # not run.
    fedavg = MethodConfig(name="fedavg", label="fedavg", options={"weights": "uniform"})
    sim = make_simulation(Job(config, fedavg, seed), federation)
    return advise(
        federation, sim.model.whole, sim.train, clients=clients, rounds=rounds, seed=seed, watch=watch
    )


def fragment(advice: Advice, config: ExperimentConfig) -> dict[str, Any]:
    """Return `{"methods": [...]}` of the available methods; without a public set, only of those that need none."""
    from tailorfl.core.method import methods

    usable = {
        name
        for name, method in methods().items()
        if config.data.public is not None or not method().needs_public
    }
    return {"methods": [row for row in advice.to_config()["methods"] if row["name"] in usable]}


def show_advice(console: Console, config: ExperimentConfig, advice: Advice) -> None:
    """Print an advice: measurements, settings, PerFed-CKT's weights, doubts, and YAML to paste."""
    show_table(console, _measured(config.name, advice))
    rows = [
        (
            row.method,
            _pairs(row.options),
            _pairs(row.train),
            "" if row.rounds is None else f"{row.rounds:,}",
            row.why,
        )
        for row in advice.recommendations
    ]
    heads = ("method", "settings", "training", "rounds", "why")
    show_table(console, make_table("settings", heads, rows, prose=("settings", "training", "why")))
    show_table(console, _transfer(advice))
    for note in advice.notes:
        say(console, f"note: {note}")
    console.print("\nto paste into an experiment:", highlight=False)
    text = _yaml(fragment(advice, config), console.width)
    console.print(Text(text), highlight=False, soft_wrap=True, end="")


def _yaml(value: Any, width: int) -> str:
    """Return YAML with lines of at most `width` if possible; the package breaks lines only after its limit."""
    import yaml

    for limit in range(width, 10, -5):
        text = str(yaml.safe_dump(value, sort_keys=False, width=limit, default_flow_style=None))
        if max(map(len, text.splitlines())) <= width:
            break
    return text


def _measured(name: str, advice: Advice) -> Table:
    facts, curved = advice.facts, advice.facts.curvature
    halves = "optima of halves" if facts.mode == "optimum" else "local training of halves"
    values: dict[str, float | SpreadInterval] = {
        "clients N": facts.clients,
        "samples of a client n (harmonic mean)": facts.samples,
        "samples of all clients": facts.total_samples,
        "weights d": facts.dim,
        "heterogeneity R": facts.radius,
        "squared error of training alone V": facts.noise,
        "  of one model for all V/N + R^2": advice.errors.pooled,
        "  of the best pull": advice.errors.coupled,
        "gradient noise rho": facts.rho,
        "smoothness L, all clients together": curved.smoothness,
        "  largest of a client": curved.client_smoothness,
        "strong convexity mu, all clients together": curved.mu,
        "  smallest of a client": curved.client_mu,
        "loss saved by own models, unseen samples": facts.gain,
        "best pull lam": advice.lam,
    }
    rows = []
    for text, value in values.items():
        if isinstance(value, int | float):
            rows.append((text, _number(value), ""))
        else:
            rows.append((text, _number(value.value), f"{_number(value.low)} to {_number(value.high)}"))
    if (bounds := advice.corollary) is not None:
        edge = f"at least {_number(bounds.lower)}" if bounds.together else f"at most {_number(bounds.upper)}"
        rows.append(("  by FedCLUP's Corollary 1", edge, ""))
    title = f"{name}: {halves}, {facts.used} of {facts.clients} clients, {facts.seconds:.1f} s"
    return make_table(title, ("", "estimate", "90 % range"), rows, prose=("",))


def _transfer(advice: Advice) -> Table:
    transfer = advice.transfer
    rows = [
        (name, *map(_number, (math.sqrt(v2), lam, alpha, own_weight)))
        for name, v2, lam, alpha, own_weight in zip(
            transfer.clients, transfer.v2, transfer.lam, transfer.alpha, transfer.own_weight, strict=True
        )
    ]
    heads = ("client", "spread v_k", "lam_k", "weight alpha_k", "own share")
    more = f"{len(rows) - SHOWN} more clients in --json" if len(rows) > SHOWN else None
    return make_table("PerFed-CKT (Theorem 4.2)", heads, rows[:SHOWN], caption=more)


def _pairs(values: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _number(value: float) -> str:
    """Return a count with commas, any other number with three digits, or "not meaningful" for NaN."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not meaningful"
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def bench_command(
    arguments: Arguments = None,
    seconds: float = 20.0,
    out: Path | None = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Time one round: a plain PyTorch loop against the engines, and recommend the fastest settings.

    Args:
        arguments: An experiment as for `tailorfl run`; its first method and seed are measured.
        seconds: Time for measuring, without building data and model.
        out (FILE): Also write everything to this file, as JSON.
    """
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out '{out}' is a folder, or its folder does not exist; use the name of a file")
    config = experiment(arguments)

    import_tensordict()  # from here on torch is needed, which takes a second to import
    from tailorfl.api import bench
    from tailorfl.runs.files import encode, write_text

    with status(quiet, "bench") as watch:
        times = bench(config, seconds=seconds, watch=watch)
    console = stdout()
    show_bench(console, times)
    if out is not None:
        write_text(out, encode(times.to_dict(), indent=1) + "\n")
        say(console, f"json: {out}")


def show_bench(console: Console, times: Bench) -> None:
    """Print the measured case, a table of engines, and the recommended settings."""
    is_part = times.measured != times.clients
    part = f"{times.measured} of " if is_part else ""
    say(
        console,
        f"{times.experiment}: one round of {times.title}, {part}{times.clients} clients, {times.model} with "
        f"{times.scalars:,} scalars, {times.gradients:,} gradients of samples in all",
    )
    if is_part:
        say(
            console,
            "a round of all clients takes too long for --seconds, so only some of the clients were timed",
        )
    if times.features:
        say(console, times.features)
    say(
        console,
        "the plain loop runs FedAvg: it computes as many gradients as the method, but nothing that the method adds",
    )
    clock = (
        "process seconds of one thread" if times.clock == "process" else f"seconds, {times.threads} threads"
    )
    heads = ("way", "fastest", "median", "clients/s", "x plain loop", "(quartiles)", "")
    show_table(console, make_table(f"a round: {clock}", heads, map(_way_cells, times.ways), prose=("",)))
    advice = times.recommendation
    console.print(Text.assemble("\nrecommended: ", (advice.settings, "bold")))
    for line in advice.why:
        say(console, f"  {line}")
    for line in advice.warnings:
        console.print(remark("note:", line, "yellow"))


def _way_cells(engine: Way) -> tuple[str, ...]:
    """Return the cells of one way to compute the round."""
    note = engine.note if engine.workers == 1 else f"{engine.note}; wall-clock time".lstrip("; ")
    if not engine.seconds:
        return (engine.name, *5 * ("–",), note)
    low, high = engine.spread
    rate = engine.clients_per_second
    return (
        engine.name,
        f"{engine.seconds_min:.4g}",
        f"{engine.seconds_median:.4g}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{engine.times_faster:.2f}",
        f"{low:.2f}-{high:.2f}",
        note,
    )
