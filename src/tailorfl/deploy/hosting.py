"""An experiment with the clients of a post, from waiting for them to the last message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tailorfl.deploy.post import Post
from tailorfl.deploy.roster import Roster
from tailorfl.deploy.serving import Deployment, for_deployment
from tailorfl.errors import ConfigError
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import check
from tailorfl.runs.extension import resumed
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.job import Observer
from tailorfl.settings.experiment import ExperimentConfig


def host_experiment(
    post: Post,
    config: ExperimentConfig,
    out: Path,
    *,
    told: Callable[[str], None] = lambda sentence: None,
    observer: Observer | None = None,
) -> ExperimentResult:
    """Runs an experiment with the clients of a post, and returns its result.

    Args:
        post: how messages travel.
        config: the experiment; `for_deployment` says what it must not ask for.
        out: result folder; what is there of the same experiment is gone on with.
        told: what is called with a sentence for the person who looks on.
        observer: who is told of rounds.

    Raises:
        TailorflError: see the message; what was finished stays on disk and the same call goes on from there.
    """
    config = for_deployment(config)
    check(config)
    name = config.name
    config, way = resumed(out, config)
    if way == "resume" and experiment_in(out).name != name:
        raise ConfigError(
            f"'{out}' holds the experiment '{experiment_in(out).name}', not '{name}'; choose another folder (--out)"
        )
    deployment = Deployment(Roster(post, config.deploy.max_bytes, told), out, config, way != "new")
    result = run_experiment(config, out, way=way, observer=observer, backend=deployment.backend)
    deployment.hand_over_the_rest()
    deployment.goodbye()
    return result
