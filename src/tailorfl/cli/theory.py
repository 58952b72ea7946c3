"""The commands `tailorfl theory ...`: calculators of the papers' formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from tailorfl.cli.listing import AsJson
from tailorfl.cli.screen import PROSE, print_json, show_table, stdout
from tailorfl.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, help="Calculate with the papers' formulas: step sizes, rounds, lam, epsilon."
)

Lam = Annotated[float, typer.Option("--lam", help="Strength of the pull (lam/2) ||v - w||^2.")]
Mu = Annotated[float, typer.Option("--mu", help="Strong convexity of the clients' losses.")]
Smoothness = Annotated[float, typer.Option("--smoothness", "--L", help="Their smoothness L.")]
Samples = Annotated[int, typer.Option("--samples", "--n", help="Samples of one client.")]
Clients = Annotated[int, typer.Option("--clients", "--m", help="Number of clients.")]
Radius = Annotated[
    float, typer.Option("--radius", "--R", help="Heterogeneity: distance of the clients' true models.")
]
Target = Annotated[float, typer.Option("--target", help="Wanted share of the first squared error.")]


@app.command()
def moreau(lam: Lam = 1.0, mu: Mu = 1.0, smoothness: Smoothness = 10.0, as_json: AsJson = False) -> None:
    """Curvature of the server's and of the clients' problem under a proximal pull."""
    from tailorfl.theory.moreau import moreau_constants

    found = moreau_constants(mu, smoothness, lam)
    _show(
        "Moreau constants",
        ("server smoothness L_g", found.global_smoothness),
        ("server strong convexity mu_g", found.global_convexity),
        ("server condition number L_g / mu_g", found.condition),
        ("client smoothness lam + L", found.local_smoothness),
        ("client strong convexity lam + mu", found.local_convexity),
        ("Lipschitz constant of w -> v*(w)", found.prox_lipschitz),
        as_json=as_json,
    )


@app.command()
def fedclup(
    lam: Lam = 1.0,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    target: Target = 1e-6,
    as_json: AsJson = False,
) -> None:
    """FedCLUP's step sizes, local steps and rounds (Corollary 2)."""
    from tailorfl.theory.fedclup import schedule, stochastic_eta

    plan = schedule(mu, smoothness, lam)
    _show(
        "FedCLUP, Corollary 2",
        ("client step eta", plan.eta),
        ("client step eta with batches", stochastic_eta(mu, smoothness, lam)),
        ("server step gamma", plan.gamma),
        ("local steps K", plan.steps),
        ("fewest local steps the proof allows", plan.fewest_steps),
        ("rate of a round (squared error)", plan.rate),
        (f"rounds until {target:g} of the first error", plan.rounds(target)),
        ("gradients of a client until then", plan.gradients(target)),
        as_json=as_json,
    )


@app.command("fedclup-steps")
def fedclup_steps(
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    lam: Annotated[
        str, typer.Option("--lam", metavar="A,B,...", help="Strengths of the pull, one a row.")
    ] = "0.01,0.1,1,10,100",
    share: Annotated[
        str,
        typer.Option("--share", metavar="A,B,...", help="Further gamma, in units of its bound 1/lam + 1/L."),
    ] = "0.1,0.9",
    as_json: AsJson = False,
) -> None:
    """FedCLUP's fewest local steps K for every lam, server step gamma and client step eta (Theorem 2)."""
    from tailorfl.theory.fedclup import fewest_steps, stochastic_eta

    shares = _numbers("share", share)
    if not all(0 < part < 1 for part in shares):
        raise ConfigError(f"share must be numbers between 0 and 1, but is '{share}': no K exists from 1 on")
    columns = [f"gamma = {part:g} of its bound" for part in shares]
    rows: list[tuple[float | str, ...]] = []
    for pull in _numbers("lam", lam):
        for name, eta in (
            ("1/(lam + L)", 1 / (pull + smoothness)),
            ("with batches", stochastic_eta(mu, smoothness, pull)),
        ):
            edge = 1 / pull + 1 / smoothness
            gammas = (edge / 2, 1 / pull, *(part * edge for part in shares))
            found = (fewest_steps(mu, smoothness, pull, gamma, eta) for gamma in gammas)
            rows.append((f"{pull:g}", f"{name} = {eta:.4g}", *found))
    title = f"FedCLUP, fewest local steps K for mu = {mu:g}, L = {smoothness:g}"
    names = ("lam", "eta", "gamma of Corollary 2", "gamma of the mean", *columns)
    _show_rows(title, names, rows, as_json)


@app.command("lambda-range")
def lambda_range_command(
    rho: Annotated[float, typer.Option("--rho", help="Standard deviation of gradient noise.")] = 2.0,
    samples: Samples = 200,
    clients: Clients = 10,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    radius: Radius = 0.05,
    as_json: AsJson = False,
) -> None:
    """Print the lam for which FedCLUP is minimax optimal (Corollary 1), with its bound (Theorem 1)."""
    from tailorfl.theory.fedclup_statistics import Problem, lambda_range, statistical_bound

    problem = Problem(mu, smoothness, rho, radius, samples, clients)
    found = lambda_range(problem)
    edge = found.lower if found.together else found.upper
    _show(
        "FedCLUP, Corollary 1",
        ("heterogeneity R", radius),
        ("threshold 1/sqrt(n)", problem.threshold),
        ("learn", "together" if found.together else "apart"),
        ("lam at least" if found.together else "lam at most", edge),
        ("squared error there at most (Theorem 1)", statistical_bound(problem, edge).value),
        as_json=as_json,
    )


@app.command()
def minimax(
    samples: Samples = 200, clients: Clients = 10, radius: Radius = 0.05, as_json: AsJson = False
) -> None:
    """Print the best possible order of the clients' squared error."""
    from tailorfl.theory.minimax import minimax_rate

    found = minimax_rate(samples, clients, radius)
    words = {
        "pooled": "pooled: one model for all is as good as any",
        "between": "between: heterogeneity decides",
        "alone": "alone: local training is as good as any",
    }
    _show(
        "minimax rate, up to constants",
        ("1/N + min(R^2, 1/n)", found.rate),
        ("regime", words[found.regime]),
        ("pooled up to R = 1/sqrt(N)", found.pooled_below),
        ("alone above R = 1/sqrt(n)", found.alone_above),
        as_json=as_json,
    )


@app.command()
def l2gd(
    lam: Lam = 1.0,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    clients: Clients = 10,
    target: Target = 1e-6,
    p: Annotated[
        float | None, typer.Option("--p", help="Probability of averaging; by default the best.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """L2GD's probability of averaging, step size and communications."""
    from tailorfl.theory.l2gd import plan

    found = plan(mu, smoothness, lam, clients, target, p)
    _show(
        "L2GD",
        ("probability of averaging p", found.p),
        ("expected smoothness", found.expected_smoothness),
        ("step size alpha", found.step),
        (f"iterations until {target:g} of the first error", found.iterations),
        ("communications until then", found.communications),
        as_json=as_json,
    )


@app.command("perfed-ckt")
def perfed_ckt(
    beta: Annotated[float, typer.Option("--beta", help="Private data: X'X = beta I.")] = 3.0,
    sigma2: Annotated[float, typer.Option("--sigma2", help="Variance of label noise.")] = 2.0,
    nu: Annotated[float, typer.Option("--nu", help="Public data: P'P = nu I.")] = 1.7,
    v2: Annotated[
        str, typer.Option("--v2", metavar="A,B,...", help="Variance of every client's true model.")
    ] = ".5,1,2,4,.2",
    as_json: AsJson = False,
) -> None:
    """PerFed-CKT's best transfer between linear models (Theorem 4.2)."""
    from tailorfl.theory.perfed_ckt import best_transfer

    found = best_transfer(beta, sigma2, nu, _numbers("v2", v2))
    each = zip(found.lam, found.alpha, found.own_weight, found.mse, strict=True)
    rows = [(client, *map(float, row), found.local_mse) for client, row in enumerate(each)]
    names = ("client", "lam", "alpha", "own weight", "error", "error alone")
    _show_rows("PerFed-CKT, Theorem 4.2", names, rows, as_json)


@app.command()
def dp(
    samples: Samples = 500,
    batch: Annotated[int, typer.Option("--batch", help="Samples of a batch; 0 is all of them.")] = 10,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the samples in a training.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds that the client takes part in.")] = 10,
    noise: Annotated[float, typer.Option("--noise", help="sigma, in units of the clip.")] = 1.0,
    delta: Annotated[float, typer.Option("--delta", help="Of (epsilon, delta)-privacy.")] = 1e-5,
    trainings: Annotated[int, typer.Option("--trainings", help="Models trained in a round; Ditto: 2.")] = 1,
    gradients: Annotated[int, typer.Option("--gradients", help="Taken of each batch; SAM: 2.")] = 1,
    sampling: Annotated[
        str, typer.Option("--sampling", help="How batches are drawn: poisson, or shuffle (passes).")
    ] = "poisson",
    target: Annotated[
        float | None, typer.Option("--target-epsilon", help="Also show the noise that reaches this epsilon.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what DP-SGD costs a client, by two accountants; needs the extra 'privacy'."""
    from typing import cast, get_args

    from tailorfl.errors import unknown
    from tailorfl.privacy.accounting import epsilon, noise_for
    from tailorfl.settings.privacy import Accountant, BatchSampling
    from tailorfl.theory.privacy import releases

    if sampling not in get_args(BatchSampling):
        raise unknown("sampling", sampling, get_args(BatchSampling))
    way = cast(BatchSampling, sampling)
    of = (samples, batch, epochs, rounds, trainings, gradients)
    rate, _, steps = releases(*of, sampling=way)
    rows: list[tuple[str, float | str]] = [("rate q", rate), ("steps", steps)]
    for by in get_args(Accountant):
        rows.append((f"epsilon by {by}", epsilon([releases(*of, noise, way)], delta, by)))
    for by in get_args(Accountant) if target is not None else ():
        assert target is not None
        rows.append(
            (
                f"noise for epsilon {target:g} by {by}",
                noise_for(target, delta, [releases(*of, sampling=way)], by),
            )
        )
    drawn = "Poisson samples" if way == "poisson" else "passes of shuffled batches"
    _show(f"DP-SGD at delta {delta:g}, {drawn}, neighbours zero-out", *rows, as_json=as_json)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers with commas between them, but is '{text}'") from error


def _show(title: str, *rows: tuple[str, float | str], as_json: bool) -> None:
    """Named values: a table of two columns, or {"title": ..., "values": {name: value}}."""
    if as_json:
        print_json({"title": title, "values": dict(rows)})
        return
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", ratio=PROSE)
    table.add_column(justify="right", ratio=PROSE)
    for name, value in rows:
        table.add_row(name, _text(value))
    show_table(stdout(), table)


def _show_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[float | str]], as_json: bool
) -> None:
    """Print a table, or {"title": ..., "rows": [{column: value}]}."""
    if as_json:
        print_json({"title": title, "rows": [dict(zip(columns, row, strict=True)) for row in rows]})
        return
    table = Table(title=title)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    show_table(stdout(), table)


def _text(value: float | str) -> str:
    """Return a whole number with commas, any other with six digits; a text as it is."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
