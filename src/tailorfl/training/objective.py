"""The objective of local training: the loss of each kind of task, and the terms that a method adds to it.

A loss is a mean over the real samples of a batch. `weight` [batch] is 1 for real samples and 0 for padding, or None if
all are real. Every function is differentiable, has no data-dependent control flow and works under `torch.func.vmap`.

Class weights make samples of rare classes count more in the loss that training descends:

    F(w) = (1/n) Σ_j a(y_j) ℓ(w; x_j, y_j),   a(c) = n / (K n_c)

n_c of n training samples are of class c and K classes occur, so all classes have equal weight and the mean of a over
these samples is 1 ("balanced" in scikit-learn). n and n_c are those of the client (`client`) or of all training clients
together (`federated`). A class that does not occur has a(c) = 1: its samples, which training never sees, have weight 1
when other parts are evaluated. The sum over a batch is divided by its number of samples, not by their weights: the
gradient stays unbiased for F, and a batch of one class keeps that class's weight.

A method may add terms to the loss of a step, or replace the loss by terms:

    loss = F(batch) + Σ term(batch)                 or  loss = Σ term(batch)  if a term replaces the loss

A term is a function of a batch, written for ONE client:

    def prototypes(seen: Seen, mean: Tensor) -> Tensor:                    # λ/B Σ ‖z_b − mean of its class‖²
        return lam * seen.mean((seen.features - mean[seen.y]).square().mean(1))

    client.fit(w, term=Term(prototypes, given=(mean,)))

It must take inputs that differ between clients through `given`, have no `if` on values, and compute every mean over
samples by `seen.mean`, which ignores padding. Its gradient is clipped and made noisy together with that of the loss.
Sample-level privacy needs a loss that is a mean over single samples, so a term that compares samples sets `mixes`.

A term on PUBLIC samples (`public` = b' of them a step) is separate: it uses no sample of the client, so it is neither
clipped by sample nor made noisy. The batches are drawn from the client's key; a pass visits the samples in random order
and in full batches, and leaves out the rest. The model is in evaluation mode: its norms use the statistics after the
private batch of the step and do not update them.

Tensors of a state that its model does not have (a second head, say) train along with the model; only terms use them, as
`seen.own`. Those that a term `keeps` are set to the values that it returns, and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from tailorfl.data.source import NO_TARGET, Source
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.models.functional import Model
from tailorfl.models.half import widened
from tailorfl.partition.rows import Ints
from tailorfl.settings.train import ClassWeights, PrivacyLevel

LARGEST_LOG = 30.0
"""Largest logarithm of an expected count; e^30 is 1e13."""
LEAST_COUNT = 1e-12
"""Count of a class without samples: its logarithm is finite, and 0 times it is 0."""


@dataclass(frozen=True)
class Loss:
    """`loss(outputs, y, weight)` of a batch, 0-d; a class, so that losses can be sent to worker processes."""

    of_batch: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    mixes: bool = False
    """Whether it compares the samples of a batch, so that it is not a mean over single samples."""

    def __call__(self, outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """Return the loss of a batch, 0-d."""
        return self.of_batch(outputs, y, weight)

    def weighed(self, classes: Tensor | None) -> Loss:
        """Return the loss with class weights `classes` [classes]; None: equal weights."""
        if classes is None:
            return self
        assert isinstance(self.of_batch, _Mean)  # only tasks with classes, see `check_class_weights`
        return Loss(_Weighed(self.of_batch.of_samples, classes))

    def shifted(self, prior: Tensor) -> Loss:
        """Return the loss of outputs + `prior` [outputs]."""
        return replace(self, of_batch=lambda outputs, y, weight: self.of_batch(outputs + prior, y, weight))


def mean_of(per_sample: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean over real samples of [batch, ...] numbers, [...]; 0 without real samples."""
    if weight is None:
        return per_sample.mean(0)
    if per_sample.ndim > 1:
        total: Tensor = torch.tensordot(weight.to(per_sample.dtype), per_sample, dims=1)
        return total / weight.sum().clamp(min=1.0)
    return (per_sample * weight).sum() / weight.sum().clamp(min=1.0)


def cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each sample, [batch], of logits [batch, classes] and labels [batch] int64."""
    # Equals F.cross_entropy, which torch.func.vmap decomposes into operations several times as slow.
    return -F.log_softmax(outputs, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def class_prior(counts: Tensor, gamma: float) -> Tensor:
    """Return γ log n_c, [classes], by which the balanced softmax (Ren et al., NeurIPS 2020) shifts logits in training.

    `counts` [classes] float: the client's training samples. For a class without samples it is very low, but finite.
    """
    return gamma * counts.clamp(min=LEAST_COUNT).log()


def binaries(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross entropy of each sample, [batch], of one logit [batch, 1] and labels [batch] in {0, 1}."""
    return F.binary_cross_entropy_with_logits(outputs[:, 0], y.to(outputs.dtype), reduction="none")


def multilabels(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over labels of the binary cross entropy of each sample, [batch], of logits [batch, labels]."""
    return F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none").mean(1)


def half_squared_errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Half the squared error of each sample summed over outputs, [batch].

    In a linear model the Hessian of their mean is X'X/n.
    """
    return 0.5 * (outputs - y.reshape(outputs.shape)).square().sum(1)


def poissons(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative Poisson log-likelihood of each sample summed over outputs, [batch], without log y!.

    `outputs` [batch, counts] are logarithms of means, `y` [batch, counts] integers of at least 0. Beyond `LARGEST_LOG`
    the mean is continued along its tangent, so that no output makes the loss infinite.
    """
    low = outputs.clamp(max=LARGEST_LOG)
    means = low.exp() * (1 + outputs - low)
    return (means - y.reshape(outputs.shape) * outputs).sum(1)


def cox(outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Negative Cox partial log-likelihood of the batch (Breslow ties), divided by its number of samples.

    `outputs` [batch, 1] log risk; `y` [batch, 2] (event, time). The risk set of a sample is every sample of
    the batch that lives at least as long, as in FLamby's TCGA-BRCA baseline.
    """
    risk, event, time = outputs[:, 0], y[:, 0], y[:, 1]
    at_risk = time[None, :] >= time[:, None]
    if weight is not None:
        at_risk = at_risk & (weight[None, :] > 0)
    lowest = torch.finfo(risk.dtype).min
    log_total = torch.logsumexp(torch.where(at_risk, risk[None, :], lowest), dim=1)
    return mean_of((log_total - risk) * event, weight)


def response_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of each sample's response, [batch].

    `outputs` [batch, length, vocabulary] logits of the NEXT token; `y` [batch, length] int64 tokens, NO_TARGET
    outside the response. 0 for a sample without response.
    """
    target = next_tokens(y)
    losses = F.cross_entropy(
        outputs.flatten(0, 1), target.flatten(), ignore_index=NO_TARGET, reduction="none"
    )
    return losses.reshape(target.shape).sum(1) / (target != NO_TARGET).sum(1).clamp(min=1)


def next_tokens(y: Tensor) -> Tensor:
    """Return the target of the output at each position, [batch, length] int64: `y` shifted one place to the left."""
    return F.pad(y[:, 1:], (0, 1), value=NO_TARGET)


SAMPLE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": cross_entropies,
    "binary": binaries,
    "multilabel": multilabels,
    "regression": half_squared_errors,
    "counts": poissons,
}
"""Loss of each sample, for tasks whose loss is its mean."""


@dataclass(frozen=True)
class _Mean:
    """The mean of the samples' losses."""

    of_samples: Callable[[Tensor, Tensor], Tensor]
    at_once: Callable[[Tensor, Tensor], Tensor] | None = None
    """The mean of a batch without padding as one operation, used outside maps."""

    def __call__(self, outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None and self.at_once is not None and not is_functorch_wrapped_tensor(outputs):
            return self.at_once(outputs, y)
        return mean_of(self.of_samples(outputs, y), weight)


@dataclass(frozen=True)
class _Weighed:
    """The mean over samples of class weight times loss."""

    of_samples: Callable[[Tensor, Tensor], Tensor]
    classes: Tensor

    def __call__(self, outputs: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        losses = self.of_samples(outputs, y)
        return mean_of(losses * self.classes.gather(0, y).to(losses.dtype), weight)


LOSSES = {
    **{task: Loss(_Mean(of_samples)) for task, of_samples in SAMPLE_LOSSES.items()},
    "classification": Loss(_Mean(cross_entropies, F.cross_entropy)),
    "survival": Loss(cox, mixes=True),
    "generation": Loss(_Mean(response_losses)),
}
"""Loss of each task."""


TASKS = ("classification", "binary")


def balanced(counts: Tensor) -> Tensor:
    """Return the class weights a(c), float64 [..., classes], from the counts of training samples [..., classes]."""
    total, several = counts.sum(-1, keepdim=True), (counts > 0).sum(-1, keepdim=True)
    return torch.where(counts > 0, total / (several.clamp(min=1) * counts.clamp(min=1)), 1.0)


def class_counts(source: Source, rows: Sequence[Ints]) -> Tensor:
    """Return the number of samples of each class among rows, float64 [lists of rows, classes]."""
    y, classes = source.y, 2 if source.task == "binary" else source.outputs
    counts = [torch.bincount(y[torch.from_numpy(chosen)], minlength=classes) for chosen in rows]
    return torch.stack(counts).double() if counts else torch.zeros(0, classes, dtype=torch.float64)


def check_class_weights(weights: ClassWeights, source: Source, level: PrivacyLevel | None) -> None:
    """Check that samples can be weighted by class, and that privacy of a level covers it.

    Raises:
        ConfigError: samples have no classes, or privacy does not cover that a sample, or a client, changes the weights
            of others.
    """
    if weights == "none":
        return
    if source.task not in TASKS:
        raise ConfigError(
            f"train.class_weights={weights} weighs samples by their class, but '{source.name}' is a {source.task} "
            "task, without classes; leave it out"
        )
    if level == "sample":
        raise ConfigError(
            f"train.class_weights={weights} counts labels of training samples, so one sample changes the weights "
            "of all others, which sample-level privacy does not cover; leave out class_weights or train.dp"
        )
    if level == "client" and weights == "federated":
        raise ConfigError(
            "train.class_weights=federated sends every client's number of samples of each class without noise, which "
            "client-level privacy does not cover; take class_weights=client, which sends nothing"
        )


def check_balanced_softmax(source: Source, level: PrivacyLevel | None) -> None:
    """Check that clients of these data can train with `objective = balanced_softmax`.

    Raises:
        ConfigError: the task has no classes, or sample-level privacy does not cover class counts.
    """
    if source.task != "classification":
        raise ConfigError(
            f"objective = balanced_softmax weighs classes, which a {source.task} task does not have; leave it out"
        )
    if level == "sample":
        raise ConfigError(
            "objective = balanced_softmax uses the number of a client's samples of each class, which sample-level "
            "privacy does not cover; leave it out, or train.dp, or take train.dp.level=client"
        )


Given = Tensor | TensorDict | tuple["Given", ...]
"""Inputs of a term or a direction, for each client."""


class Seen:
    """One client's batch, as a term sees it."""

    def __init__(
        self,
        model: Model,
        loss: Loss,
        batch: tuple[Tensor, Tensor, Tensor | None],
        outputs: Tensor,
        features: Callable[[], Tensor],
        state: Mapping[str, Tensor],
        rows: Tensor | None = None,
    ) -> None:
        self._model, self._loss, self._features, self._state = model, loss, features, state
        self.x, self.y, self.weight = batch
        """Inputs [batch, ...], targets [batch, ...] and 1 for real samples or 0 for padding (None: all are real)."""
        self.outputs = outputs
        """Outputs of the trained model, [batch, outputs]."""
        self._rows = rows

    @classmethod
    def evaluated(
        cls,
        model: Model,
        loss: Loss,
        batch: tuple[Tensor, Tensor, Tensor | None],
        state: Mapping[str, Tensor],
        rows: Tensor | None = None,
    ) -> Seen:
        """Return a term's view of a batch, with the model in evaluation mode."""
        outputs, features = model.with_features(state, batch[0])
        return cls(model, loss, batch, outputs, features, state, rows)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """All tensors of the trained model, and those that train along with it, by name."""
        return self._state

    def through(self, layer: str, *inputs: Tensor) -> Tensor:
        """Return the output of a layer of the trained model on other inputs, in evaluation mode; gradients flow.

        `layer` is its dotted name.
        """
        with self._model.bound(self._state) as module:
            out: Tensor = widened(module.get_submodule(layer)(*inputs))
        return out

    @property
    def own(self) -> dict[str, Tensor]:
        """The tensors that train along and do not belong to the model, by name."""
        return {name: t for name, t in self._state.items() if name not in self._model.sizes}

    @property
    def features(self) -> Tensor:
        """The input of the trained model's head, [batch, width].

        Raises:
            ModelError: the model has no layer that could be the head.
        """
        return self._features()

    @property
    def loss(self) -> Tensor:
        """The run's own loss of the batch, 0-d."""
        return self._loss(self.outputs, self.y, self.weight)

    @property
    def rows(self) -> Tensor:
        """The batch's rows of the public set, [batch] int64; only in terms on public samples."""
        if self._rows is None:
            raise TailorflError(
                "seen.rows needs a term on public samples; set their number with Term(..., public=...)"
            )
        return self._rows

    def mean(self, per_sample: Tensor) -> Tensor:
        """Return the mean of [batch, ...] numbers over the real samples, [...]; 0 without real samples."""
        return mean_of(per_sample, self.weight)

    def of(self, state: TensorDict | Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (outputs, features) on the batch of another state of the same architecture.

        It is in evaluation mode, and no gradient flows into it.
        """
        # Looking up names in a TensorDict one by one is slow.
        tensors = cast(dict[str, Tensor], dict(state.items()))
        outputs, features = self._model.outputs_and_features(tensors, self.x)
        return outputs.detach(), features.detach()


@dataclass(frozen=True)
class Term:
    """A term of the loss.

    Attributes:
        function: `function(seen, *given)` returns a 0-d tensor; with `keeps`, see there.
        given: tensors and TensorDicts that it needs, shared by all clients or each client's own.
        replaces: whether the run's loss is left out; one term that replaces it is enough.
        mixes: whether it compares samples of a batch, so that it is not a mean over single samples.
        public: b', number of public samples a step, at most all of them; None: the client's own batch.
        keeps: names of tensors of the start, not of the model, that the term itself updates, such as a running mean.
            The function then returns (value, {name: new tensor}) and sees the current ones as `seen.own`. No gradient
            moves them, and none flows through them.

    Raises:
        TailorflError: `public` below 1, or a term on public data that replaces the loss or keeps something.
    """

    function: Callable[..., Any]
    given: tuple[Given, ...] = ()
    replaces: bool = False
    mixes: bool = False
    public: int | None = None
    keeps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.public is not None and (self.public < 1 or self.replaces or self.keeps):
            raise TailorflError(
                "a term on public samples needs public >= 1, and neither replaces nor keeps, but has "
                f"public={self.public}, replaces={self.replaces}, keeps={self.keeps}"
            )

    def value(self, seen: Seen, given: Sequence[Any]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the term of a batch, 0-d, and the new values of the tensors that it keeps.

        Raises:
            TailorflError: the function does not return exactly these.
        """
        returned = self.function(seen, *given)
        if not self.keeps:
            return returned, {}
        value, new = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(new, Mapping) or set(new) != set(self.keeps):
            raise TailorflError(
                f"a term that keeps {', '.join(self.keeps)} must return (value, {{name: new tensor}}) with exactly "
                "these names"
            )
        return value, {name: tensor.detach() for name, tensor in new.items()}
