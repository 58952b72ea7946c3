"""Class weights: samples of rare classes count more in the loss that training descends.

    F(w) = (1/n) Σ_j a(y_j) ℓ(w; x_j, y_j),   a(c) = n / (K n_c)

n_c of n training samples are of class c and K classes occur, so that all classes count alike and the mean of a over
those samples is 1 ("balanced" in scikit-learn). n and n_c are a client's own (`client`) or those of all training
clients together (`federated`). A class that does not occur has a(c) = 1: its samples, which training never sees, count
as they are in looks at other parts.

The sum over a batch is divided by its samples and not by their weights: the gradient stays unbiased for F, and a batch
of one class keeps that class's weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailorfl.data.rows import Ints
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.settings.privacy import PrivacyLevel
from tailorfl.settings.train import ClassWeights

TASKS = ("classification", "binary")


def balanced(counts: Tensor) -> Tensor:
    """Return a(c) of the training samples of each class, float64 [..., classes] of such counts [..., classes]."""
    total, several = counts.sum(-1, keepdim=True), (counts > 0).sum(-1, keepdim=True)
    return torch.where(counts > 0, total / (several.clamp(min=1) * counts.clamp(min=1)), 1.0)


def class_counts(source: Source, rows: Sequence[Ints]) -> Tensor:
    """Return how many samples of each class there are among rows, float64 [lists of rows, classes]."""
    y, classes = source.y, 2 if source.task == "binary" else source.outputs
    counts = [torch.bincount(y[torch.from_numpy(mine)], minlength=classes) for mine in rows]
    return torch.stack(counts).double() if counts else torch.zeros(0, classes, dtype=torch.float64)


def check_class_weights(wanted: ClassWeights, source: Source, level: PrivacyLevel | None) -> None:
    """Nothing if samples can be weighed by their class, and privacy of a level covers it.

    Raises:
        ConfigError: samples have no class; a sample changes the weights of others, or a client those of others.
    """
    if wanted == "none":
        return
    if source.task not in TASKS:
        raise ConfigError(
            f"train.class_weights={wanted} weighs samples by their class, but '{source.name}' is a task of "
            f"{source.task}, which has none; leave it out"
        )
    if level == "sample":
        raise ConfigError(
            f"train.class_weights={wanted} counts the labels of training samples, so one sample changes the weights of "
            "all others, which sample-level privacy does not cover; leave out class_weights or train.dp"
        )
    if level == "client" and wanted == "federated":
        raise ConfigError(
            "train.class_weights=federated sends every client's number of samples of each class without noise, which "
            "client-level privacy does not cover; take class_weights=client, which sends nothing"
        )


def check_balanced_softmax(source: Source, level: PrivacyLevel | None) -> None:
    """Check that clients of these data can train with `objective = balanced_softmax`.

    Raises:
        ConfigError: the task has no classes, or sample-level privacy does not cover the counts of classes.
    """
    if source.task != "classification":
        raise ConfigError(
            f"objective = balanced_softmax weighs classes (data with task classification), which a task of "
            f"{source.task} does not have; leave it out"
        )
    if level == "sample":
        raise ConfigError(
            "objective = balanced_softmax uses the number of a client's samples of each class, which sample-level "
            "privacy does not cover; leave it out, or train.dp, or take train.dp.level=client"
        )
