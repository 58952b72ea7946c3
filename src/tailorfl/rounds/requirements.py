"""Requirements that a run's settings place on method and data: for privacy, attacks and aggregation rules."""

from __future__ import annotations

from tailorfl.core.method import Method, methods
from tailorfl.data.scaling import PRIVATE_SCALING, PrivateScaling
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import CYCLIC, Sampling, Weights
from tailorfl.settings.train import ClassWeights, PrivacyLevel
from tailorfl.training.objective import check_balanced_softmax, check_class_weights


def check_federated(method: Method, lacking: str) -> None:
    """Check that the clients of a method train on their own data.

    `lacking` names what is missing without such clients. Raises ConfigError.
    """
    if method.pooled:
        raise ConfigError(
            f"{method.title} trains on pooled data, so there are no {lacking}; leave it out of this comparison"
        )


def check_mean_only(method: Method, consequence: str) -> None:
    """Check that the server of a method needs only the mean of replies.

    `consequence` says what is impossible if it needs more. Raises ConfigError.
    """
    if not method.averages_replies:
        able = sorted(n for n, m in methods().items() if not m.pooled and m().averages_replies)
        raise ConfigError(
            f"the server of {method.title} needs more than the mean of its clients' replies, so {consequence}; methods "
            f"that support this: {', '.join(able)}"
        )


def check_private(method: Method, level: PrivacyLevel, weights: Weights) -> None:
    """Check that a method supports privacy of a level with these weights of clients.

    Raises:
        ConfigError: privacy does not cover the method's use of private data, or settings must change.
    """
    leak = method.unprotected(level)
    if leak:
        raise ConfigError(
            f"{method.title} uses {leak}, which {level}-level privacy does not cover; change that, or leave out "
            "train.dp"
        )
    if level == "sample":
        return
    check_federated(method, "clients for client-level privacy to protect")
    if method.averages_replies and weights != "uniform":
        raise ConfigError(
            f"client-level privacy of {method.title} needs equal weights, since one client may hold most samples; "
            "set weights=uniform"
        )


def check_samples(
    source: Source, class_weights: ClassWeights, balanced: bool, level: PrivacyLevel | None
) -> None:
    """Check that samples fit the class weights and a `balanced` loss, and that privacy covers how they were scaled.

    Raises:
        ConfigError: samples were scaled by statistics of private ones, so that one sample, or one client, changes all
            others; or a loss or class weights need classes that samples do not have, or are not covered by privacy.
    """
    scaled: PrivateScaling | None = source.info.get(PRIVATE_SCALING)
    if scaled is not None and (level == "sample" or (level == "client" and scaled.shared)):
        raise ConfigError(
            f"the samples of '{source.name}' are scaled by {scaled.by}, so one {level} changes all others, which "
            f"{level}-level privacy does not cover; scale them with public constants ({scaled.instead})"
        )
    check_class_weights(class_weights, source, level)
    if balanced:
        check_balanced_softmax(source, level)


def check_fraction(fraction: float, sampling: Sampling) -> None:
    """Check the share of clients in a round. Raises ConfigError."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction must lie in (0, 1], but is {fraction}")
    if sampling in CYCLIC and fraction != 1:
        raise ConfigError(
            f"sampling={sampling} has one client per round, so fraction={fraction} has no effect; leave it out"
        )
