"""The commands `tailorfl theory ...`: calculators of the papers' formulas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, cast, get_args

import typer

from tailorfl.cli.arguments import AsJson, documented
from tailorfl.cli.screen import PROSE, make_table, print_json, show_table, stdout
from tailorfl.errors import ConfigError, unknown

app = typer.Typer(
    no_args_is_help=True,
    help="Calculate with the papers' formulas: step sizes, rounds, lam, epsilon.",
)
Value = float | str
Values = dict[str, Value]
"""Named values: printed as a table of two columns, or as JSON {"title": ..., "values": {name: value}}."""
Rows = list[Values]
"""Rows of a table, each value by its column; as JSON {"title": ..., "rows": [{column: value}]}."""

Smoothness = Annotated[float, typer.Option("--smoothness", "--L", help="Their smoothness L.")]
Samples = Annotated[int, typer.Option("--samples", "--n", help="Samples of one client.")]
Clients = Annotated[int, typer.Option("--clients", "--m", help="Number of clients.")]
Lam = Annotated[float, typer.Option("--lam", help="Strength of the pull (lam/2) ||v - w||^2.")]
Mu = Annotated[float, typer.Option("--mu", help="Strong convexity of the clients' losses.")]
Radius = Annotated[
    float, typer.Option("--radius", "--R", help="Heterogeneity: distance of the clients' true models.")
]
Target = Annotated[float, typer.Option("--target", help="Wanted share of the first squared error.")]


def calculator(function: Callable[..., tuple[str, Values | Rows]]) -> None:
    """Register a command of a function's name and options that prints the title and the numbers it returns."""
    documented(function)

    @wraps(function)
    def command(as_json: bool, **options: Any) -> None:
        title, numbers = function(**options)
        if as_json:
            print_json({"title": title, "values" if isinstance(numbers, dict) else "rows": numbers})
        elif isinstance(numbers, dict):
            rows = [(name, _text(value)) for name, value in numbers.items()]
            table = make_table(title, ("", " "), rows, show_header=False)
            for column in table.columns:
                column.ratio = PROSE
            table.columns[0].style = "bold"
            show_table(stdout(), table)
        else:
            show_table(
                stdout(),
                make_table(title, list(numbers[0]), [tuple(map(_text, row.values())) for row in numbers]),
            )

    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    signature = inspect.signature(function)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]  # read by inspect.signature
        parameters=[*signature.parameters.values(), option]
    )
    command.__annotations__ = {**function.__annotations__, "as_json": AsJson}
    app.command(function.__name__.replace("_", "-"))(command)


@calculator
def moreau(lam: Lam = 1.0, mu: Mu = 1.0, smoothness: Smoothness = 10.0) -> tuple[str, Values]:
    """Print the curvature of the server's and of the clients' problem under a proximal pull."""
    from tailorfl.theory.fedclup import moreau_constants

    constants = moreau_constants(mu, smoothness, lam)
    return "Moreau constants", {
        "server smoothness L_g": constants.global_smoothness,
        "server strong convexity mu_g": constants.global_convexity,
        "server condition number L_g / mu_g": constants.condition,
        "client smoothness lam + L": constants.local_smoothness,
        "client strong convexity lam + mu": constants.local_convexity,
        "Lipschitz constant of w -> v*(w)": constants.prox_lipschitz,
    }


@calculator
def fedclup(
    lam: Lam = 1.0, mu: Mu = 1.0, smoothness: Smoothness = 10.0, target: Target = 1e-6
) -> tuple[str, Values]:
    """Print FedCLUP's step sizes, local steps and rounds (Corollary 2)."""
    from tailorfl.theory.fedclup import schedule, stochastic_eta

    plan = schedule(mu, smoothness, lam)
    return "FedCLUP, Corollary 2", {
        "client step eta": plan.eta,
        "client step eta with batches": stochastic_eta(mu, smoothness, lam),
        "server step gamma": plan.gamma,
        "local steps K": plan.steps,
        "fewest local steps the proof allows": plan.fewest_steps,
        "rate of a round (squared error)": plan.rate,
        f"rounds until {target:g} of the first error": plan.rounds(target),
        "gradients of a client until then": plan.gradients(target),
    }


@calculator
def fedclup_steps(
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    lam: str = "0.01,0.1,1,10,100",
    share: str = "0.1,0.9",
) -> tuple[str, Rows]:
    """Print FedCLUP's fewest local steps K for every lam, server step gamma and client step eta (Theorem 2).

    Args:
        lam (A,B,...): Strengths of the pull, one per row.
        share (A,B,...): Further gamma, in units of its bound 1/lam + 1/L.
    """
    from tailorfl.theory.fedclup import fewest_steps, stochastic_eta

    shares = _numbers("share", share)
    if not all(0 < part < 1 for part in shares):
        raise ConfigError(f"share must be numbers between 0 and 1, but is '{share}': no K exists from 1 on")
    rows: Rows = []
    for pull in _numbers("lam", lam):
        with_batches = stochastic_eta(mu, smoothness, pull)  # refuses what is not positive
        edge = 1 / pull + 1 / smoothness
        gammas = {"gamma of Corollary 2": edge / 2, "gamma of the mean": 1 / pull}
        gammas |= {f"gamma = {part:g} of its bound": part * edge for part in shares}
        etas = {"1/(lam + L)": 1 / (pull + smoothness), "with batches": with_batches}
        for name, eta in etas.items():
            steps = {title: fewest_steps(mu, smoothness, pull, gamma, eta) for title, gamma in gammas.items()}
            rows.append({"lam": f"{pull:g}", "eta": f"{name} = {eta:.4g}", **steps})
    return f"FedCLUP, fewest local steps K for mu = {mu:g}, L = {smoothness:g}", rows


@calculator
def lambda_range(
    rho: float = 2.0,
    samples: Samples = 200,
    clients: Clients = 10,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    radius: Radius = 0.05,
) -> tuple[str, Values]:
    """Print the lam for which FedCLUP is minimax optimal (Corollary 1), with its bound (Theorem 1).

    Args:
        rho: Standard deviation of gradient noise.
    """
    from tailorfl.theory import fedclup_statistics as statistics

    problem = statistics.Problem(mu, smoothness, rho, radius, samples, clients)
    bounds = statistics.lambda_range(problem)
    edge = bounds.lower if bounds.together else bounds.upper
    return "FedCLUP, Corollary 1", {
        "heterogeneity R": radius,
        "threshold 1/sqrt(n)": problem.threshold,
        "learn": "together" if bounds.together else "apart",
        "lam at least" if bounds.together else "lam at most": edge,
        "squared error there at most (Theorem 1)": statistics.statistical_bound(problem, edge).value,
    }


@calculator
def minimax(samples: Samples = 200, clients: Clients = 10, radius: Radius = 0.05) -> tuple[str, Values]:
    """Print the best possible order of the clients' squared error."""
    from tailorfl.theory.fedclup_statistics import minimax_rate

    rate = minimax_rate(samples, clients, radius)
    meanings = {
        "pooled": "one model for all is as good as any",
        "between": "heterogeneity decides",
        "alone": "local training is as good as any",
    }
    return "minimax rate, up to constants", {
        "1/N + min(R^2, 1/n)": rate.rate,
        "regime": f"{rate.regime}: {meanings[rate.regime]}",
        "pooled up to R = 1/sqrt(N)": rate.pooled_below,
        "alone above R = 1/sqrt(n)": rate.alone_above,
    }


@calculator
def l2gd(
    lam: Lam = 1.0,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    clients: Clients = 10,
    target: Target = 1e-6,
    p: float | None = None,
) -> tuple[str, Values]:
    """Print L2GD's probability of averaging, step size and communications.

    Args:
        p: Probability of averaging; by default the best.
    """
    from tailorfl.theory.l2gd import plan

    schedule = plan(mu, smoothness, lam, clients, target, p)
    return "L2GD", {
        "probability of averaging p": schedule.p,
        "expected smoothness": schedule.expected_smoothness,
        "step size alpha": schedule.step,
        f"iterations until {target:g} of the first error": schedule.iterations,
        "communications until then": schedule.communications,
    }


@calculator
def perfed_ckt(
    beta: float = 3.0, sigma2: float = 2.0, nu: float = 1.7, v2: str = ".5,1,2,4,.2"
) -> tuple[str, Rows]:
    """Print PerFed-CKT's best transfer between linear models (Theorem 4.2).

    Args:
        beta: Private data: X'X = beta I.
        sigma2: Variance of label noise.
        nu: Public data: P'P = nu I.
        v2 (A,B,...): Variance of every client's true model.
    """
    from tailorfl.theory.perfed_ckt import best_transfer

    transfer = best_transfer(beta, sigma2, nu, _numbers("v2", v2))
    columns = {"lam": transfer.lam, "alpha": transfer.alpha, "own weight": transfer.own_weight}
    columns["error"] = transfer.mse
    rows: Rows = [
        {"client": client, **{name: float(values[client]) for name, values in columns.items()}}
        for client in range(len(transfer.lam))
    ]
    return "PerFed-CKT, Theorem 4.2", [{**row, "error alone": transfer.local_mse} for row in rows]


@calculator
def dp(
    samples: Samples = 500,
    batch: int = 10,
    epochs: int = 1,
    rounds: int = 10,
    noise: float = 1.0,
    delta: float = 1e-5,
    trainings: int = 1,
    gradients: int = 1,
    sampling: str = "poisson",
    target: float | None = None,
) -> tuple[str, Values]:
    """Print the privacy cost of DP-SGD for a client, by two accountants; needs the extra 'privacy'.

    Args:
        batch: Samples in a batch; 0 for all.
        epochs: Passes over the samples in a training.
        rounds: Rounds in which the client takes part.
        noise: sigma, in units of the clip.
        delta: Delta of (epsilon, delta)-privacy.
        trainings: Models trained in a round; Ditto: 2.
        gradients: Gradients per batch; SAM: 2.
        sampling: How batches are drawn: poisson, or shuffle (passes).
        target (--target-epsilon): Also show the noise that reaches this epsilon.
    """
    from tailorfl.privacy import epsilon, noise_for
    from tailorfl.settings.train import Accountant, BatchSampling
    from tailorfl.theory.privacy import releases

    if sampling not in get_args(BatchSampling):
        raise unknown("sampling", sampling, get_args(BatchSampling))
    draw = cast(BatchSampling, sampling)
    counts = (samples, batch, epochs, rounds, trainings, gradients)
    noiseless = releases(*counts, sampling=draw)
    values: Values = {"rate q": noiseless[0], "steps": noiseless[2]}
    for by in get_args(Accountant):
        values[f"epsilon by {by}"] = epsilon([releases(*counts, noise, draw)], delta, by)
    if target is not None:
        for by in get_args(Accountant):
            values[f"noise for epsilon {target:g} by {by}"] = noise_for(target, delta, [noiseless], by)
    batches = "Poisson samples" if draw == "poisson" else "passes of shuffled batches"
    return f"DP-SGD at delta {delta:g}, {batches}, neighbours zero-out", values


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers with commas between them, but is '{text}'") from error


def _text(value: Value) -> str:
    """Return an integer with commas, any other number with six digits; a string unchanged."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
