"""The experiment of a deployment: what it must not ask for, said before anything starts."""

from __future__ import annotations

import logging

from tailorfl.core.method import make_method
from tailorfl.deploy.client_session import OWN_SETS
from tailorfl.errors import ConfigError
from tailorfl.runs.job import Job
from tailorfl.runs.privacy import privacy_of
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

log = logging.getLogger(__name__)


def for_deployment(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment as it can take place on real machines: with a checkpoint after every round.

    Raises:
        ConfigError: it cannot; says why, before anything starts.
    """
    for line in config.methods:
        method = make_method(line.name, line.options)
        if method.pooled:
            raise ConfigError(
                f"{method.title} trains on all clients' samples in one place, which a deployment never has; simulate "
                f"it with tailorfl run, and leave '{line.label}' out here"
            )
        privacy = privacy_of(Job(config, line, config.seeds[0]))
        is_secret = method.sampled(config.sampling) == "bernoulli" and config.fraction < 1
        if privacy is not None and privacy.level == "client" and is_secret:
            raise ConfigError(
                f"the epsilon of '{line.label}' counts on nobody seeing who takes part (sampling=bernoulli), but a "
                "deployment shows it on the network and in its trace; take sampling=uniform"
            )
        if {**config.train.model_dump(), **line.train}["class_weights"] == "federated":
            raise ConfigError(
                f"'{line.label}' has train.class_weights=federated, which needs every client's samples of each "
                "class, and those do not leave a client here; take class_weights=client"
            )
    problems = {
        "clients cannot choose their best rounds yet; use eval.select=last": config.eval.select != "last",
        "system describes devices that are simulated, and here they are real; leave it out, or simulate with tailorfl "
        "run (how many replies a round needs is deploy.min_replies here)": config.system != DEFAULT.system,
        "engine.precision=auto lets each machine measure what is faster there, and clients of one round would not "
        "compute alike; use float32, or bfloat16 if every client has it": config.engine.precision == "auto",
        "engine.precision=tf32 is for GPUs, and deployed clients calculate on their processors; take float32 or "
        "bfloat16": config.engine.precision == "tf32",
        "clients that never train cannot be held out in a deployment; leave out data.heldout_clients and "
        "data.heldout_domain": config.data.heldout_clients or config.data.heldout_domain,
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(problem)
    chosen = () if config.eval.final == DEFAULT.eval.final else config.eval.final  # no warning of a default
    sets = dict.fromkeys((*config.eval.sets, *chosen))
    if dropped := ", ".join(name for name in sets if name not in (*OWN_SETS, "participants")):
        log.warning("no single client can measure models on %s, so these sets of eval are left out", dropped)
    return config.model_copy(update={"checkpoint_every": 1})
