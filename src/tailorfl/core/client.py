"""The client handle: everything that the client half of a method may use, and the only entry to local training.

A method's `local` and `personal` are written for ONE client. Under an engine that maps them over a cohort
with `torch.func.vmap`, the handle's operations (`fit`, `loss`) carry their own batching rule
(`torch.autograd.Function.vmap`): they see the whole cohort's physical tensors, train it in one loop and hand
back per-client results. So client code is pure mathematics, and the loop underneath still works in place and
without padding idle clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ClientError, TailorflError, first_few
from tailorfl.interface import check_hooks
from tailorfl.models.layers import Groups, layer_groups
from tailorfl.training import inference, tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.fit import fit
from tailorfl.training.gradients import Directions, Gradient
from tailorfl.training.objective import Given, Term
from tailorfl.training.operations import NOTHING, Computed, Drawn, ExternalTraining, Packed, apply, who
from tailorfl.training.plan import Length, steps_of
from tailorfl.training.request import FitRequest, by_component
from tailorfl.training.update import OF_RUN, Optimizer

Start = TypeVar("Start", TensorDict, Mapping[str, TensorDict])
"""A model state, or several by name."""
RUN = Length()
"""The length in the run's settings."""


class Client:
    """One client inside `local` or `personal`; made by an engine, never by a method."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_hooks(cls, Client)

    def __init__(self, cohort: Cohort, position: Tensor) -> None:
        self._cohort, self._position = cohort, position
        self.config = cohort.config
        self.split = cohort.split
        self.metrics: dict[str, Tensor] = {}
        """Numbers the client reports by name, 0-d: the mean training loss of each stage, and those a method adds."""
        self.gradients = torch.zeros((), device=cohort.device)
        """Number of per-sample gradients that its fits have computed so far, 0-d."""
        self._trainable = frozenset(cohort.split.trainable)
        self._fits = 0

    @property
    def round(self) -> int:
        """Number of the federation's rounds before this one."""
        return self._cohort.round

    @property
    def id(self) -> Tensor:
        """The client's number, by which the server identifies it, 0-d int64."""
        return torch.tensor(self._cohort.ids)[self._position].to(self._cohort.device)

    @property
    def samples(self) -> Tensor:
        """Number of training samples n_i, 0-d float tensor."""
        return self._number(self._cohort.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors of a model state, parameters and running statistics."""
        return tuple(self._cohort.model.sizes)

    @property
    def who(self) -> str:
        """The client's name for messages, or the names of all clients of the cohort if they are mapped over."""
        ids = self._cohort.ids
        try:
            return who([ids[int(self._position)]])
        except RuntimeError:  # mapped over all of them
            return who(ids)

    def rate(self, lr: float | None) -> float | None:
        """Return a method's own learning rate, decayed for this round (`train.round_schedule`).

        None, which means the run's rate in `fit`, stays None. `config.lr` is already decayed.
        """
        return None if lr is None else lr * self.config.decay

    def steps(self, length: Length = RUN) -> Tensor:
        """Return the number of SGD steps K that a fit of this length takes, 0-d float tensor."""
        return self._number(self._taken(length))

    def most_steps(self, length: Length = RUN) -> int:
        """Return the largest number of steps of any client in the cohort, to bound a loop of one-step fits.

        It depends on which clients happen to run together; the effect of a step must depend on `steps` alone.
        """
        return int(self._taken(length).max())

    def fit(
        self,
        start: Start,
        *,
        train: Collection[str] | None = None,
        prox: tuple[float | Tensor, TensorDict | Mapping[str, TensorDict]] | None = None,
        direction: Directions | None = None,
        given: Sequence[Given] = (),
        term: Term | Sequence[Term] = (),
        length: Length = RUN,
        optimizer: Optimizer = OF_RUN,
        purpose: str = "train",
    ) -> Start:
        """Return `start` after mini-batch training on this client's data; `start` itself is not changed.

        Every fit starts a fresh optimizer and schedule, even where several fits make up one training.

        Args:
            start: a full model state, or several named ones that train together on the same batches (with
                `direction`).
            train: names of the parameters to train (default: all that the split does not freeze); modules
                with no trained parameter keep their batch-norm statistics.
            prox: (λ, centre): adds the penalty (λ/2)‖p − centre‖² over the trained parameters.
            direction: `direction(state, grad, *given)` returns the direction to descend along; `grad(parameters,
                of="", batch=0)` is the batch gradient at any parameters. It must take per-client tensors through
                `given`, not by closure. With several models, one function moves all of them together. A mapping of
                one function per model moves them one after the other, in its order and with any optimizer: each
                function sees the models before its own after their step, and returns the direction of its own.
            term: one or more terms that are added to the loss or replace it, see `tailorfl.training.objective`; for a
                single model only. Tensors of `start` that are not in the model are trained too, unless `train` leaves
                them out; the run's clipping bounds their gradient separately from the model's.
            length: how long, and on which batches; by default the run's. If a step takes several batches, epochs are
                rounded up to a whole step: its last batches may come from a further pass. The reported loss is that
                of each step's first gradient.
            optimizer: the update rule; by default the run's.
            purpose: names the random sequence of batches; fits with the same purpose see the same batches in a round,
                except with privacy noise, where each fit draws its own.

        Raises:
            ClientError: training failed; names client, round and stage.
            ConfigError: momentum with adamw.
            TailorflError: other arguments that do not fit together.
        """
        single = isinstance(start, TensorDict)
        if isinstance(start, TensorDict):
            self._check_model("client.fit", start)
        strength, centre = (None, None) if prox is None else prox
        request = FitRequest(
            self._cohort,
            by_component(start),
            train,
            strength,
            None if centre is None else by_component(centre),
            direction,
            Packed.of(tuple(given)) if given else NOTHING,
            (term,) if isinstance(term, Term) else tuple(term),
            length,
            optimizer,
            purpose,
            self._fits,
        )
        result = fit(self._position, request)
        self._fits += 1
        if result is None:
            return start
        self.metrics[purpose], self.gradients = result.loss, self.gradients + result.gradients
        models = {
            name: TensorDict({**state, **result.models[name]}, batch_size=[])
            for name, state in request.start.items()
        }
        return models[""] if single else models  # type: ignore[return-value]

    def loss(self, state: TensorDict, part: str = "train") -> Tensor:
        """Return the mean loss of a model state on this client's `part` ("train" or "val"), 0-d tensor.

        The model is in evaluation mode; the mean over an empty part is 0.

        Raises:
            TailorflError: under sample-level privacy, which does not cover reading samples without noise.
        """
        self._refuse_look(f"client.loss(..., '{part}')", part)
        self._check_model("client.loss", state)
        return apply(inference.mean_loss(self._cohort, part), self._position, tree.tensors(state))

    def summed(
        self,
        state: TensorDict,
        of: Callable[..., Tensor],
        given: Sequence[Given] = (),
        by_class: bool = False,
        most: int | None = None,
    ) -> Tensor:
        """Return the sum of `of(seen, *given)` over this client's training samples, or one sum per class.

        Args:
            state: a model state, in evaluation mode.
            of: a function of a batch (`tailorfl.training.objective.Seen`) that returns [batch, ...], one entry for
                each sample that depends on that sample alone.
            given: per-client tensors and TensorDicts for `of`.
            by_class: whether to sum by label, [classes, ...] (classification only); else [...].
            most: largest number of training samples to sum over, drawn at random in every round; by default all.

        Raises:
            TailorflError: under sample-level privacy, which does not cover reading samples without noise; `by_class`
                in a task other than classification.
            ClientError: `of` failed, or does not return one entry for each sample.
        """
        self._refuse_look("client.summed(...)")
        self._check_model("client.summed", state)
        packed = Packed.of((state, tuple(given)))
        classes = self._classes() if by_class else None
        call = inference.sample_sum(self._cohort, of, packed.form, classes, most)
        return apply(call, self._position, packed.leaves)

    def compute(self, of: Computed, given: TensorDict) -> TensorDict:
        """Return `of(samples, given)`, computed by another library on this client's training samples.

        Args:
            of: a function of `tailorfl.training.operations.TrainingSamples` and a TensorDict without nested ones, that
                returns tensors by name. Their shapes must not depend on the samples: there are none when the work of
                a round is only counted.
            given: per-client tensors for `of`.

        Raises:
            TailorflError: under sample-level privacy, which does not cover reading samples without noise.
            ClientError: `of` failed.
        """
        self._refuse_look("client.compute(...)")
        call = ExternalTraining(self._cohort, of)
        return TensorDict(apply(call, self._position, tree.tensors(given)), batch_size=[])

    def shapes(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of these parameters of the model by name."""
        module = self._cohort.model.module
        return {name: tuple(module.get_parameter(name).shape) for name in names}

    def drawn(self, shapes: Mapping[str, tuple[int, ...]], purpose: str) -> TensorDict:
        """Return random numbers of these shapes by name, uniform between 0 and 1.

        In every engine they depend only on the run's seed, the client, the round and the purpose. No sample is read.
        """
        dtype = self._cohort.model.module.get_parameter(self.split.trainable[0]).dtype
        drawn = Drawn(self._cohort, tuple(shapes.values()), dtype, purpose)
        return TensorDict(dict(zip(shapes, apply(drawn, self._position), strict=True)))

    def class_counts(self) -> Tensor:
        """Return the number of the client's training samples per class, [classes] float.

        Raises:
            TailorflError: as `summed` does.
        """
        self._refuse_look("client.class_counts()")
        self._classes()
        return self._cohort.label_counts[self._position].to(self._cohort.device)

    def fisher(self, state: TensorDict) -> Tensor:
        """Return the trace of a model's empirical Fisher information, 0-d: Σ ‖∇ mean loss of a batch‖².

        The sum is over the batches, of the run's size, of one pass over this client's training samples. The gradient
        is that of the parameters that the split does not freeze, with the model in evaluation mode.

        Raises:
            TailorflError: as `loss` does.
        """
        self._refuse_look("client.fisher(...)")
        self._check_model("client.fisher", state)
        return apply(inference.fisher_trace(self._cohort), self._position, tree.tensors(state))

    def _classes(self) -> int:
        source = self._cohort.source
        if source.task != "classification":
            raise TailorflError(
                f"sums by class need a classification task, but '{source.name}' is a {source.task} task"
            )
        return source.outputs

    def _check_model(self, call: str, state: TensorDict) -> None:
        """Raise a ClientError that lists a state's entries if it lacks tensors of the model."""
        absent = [name for name in self.names if name not in state]
        if absent:
            entries = first_few([path for path, _ in tree.leaves(state)], 5) or "nothing"
            raise ClientError(
                f"{self.who}, round {self.round + 1}: {call} needs a model, but got {entries}, which lacks "
                f"{first_few(absent, 5)}. Pass only the model (an entry 'w/bias' belongs to state['w']); if the model "
                "was received, check the reply of local(), the result of aggregate() and the message of broadcast()"
            )

    def _refuse_look(self, call: str, part: str = "train") -> None:
        if self.config.dp is not None:
            raise TailorflError(
                f"{call} uses a client's {part} samples without noise, which sample-level privacy does not cover; "
                "train without train.dp, or with train.dp.level=client"
            )

    def predict_public(self, state: TensorDict) -> Tensor:
        """Return the outputs (logits) of a model state on the public set, float [P, outputs].

        The model is in evaluation mode.

        Raises:
            TailorflError: the federation has no public set.
        """
        public = self._cohort.public
        if public is None:
            raise TailorflError(
                "predict_public() needs a public set, but the federation has none; set data.public, and needs_public = "
                "True in the method, so that a run without it is refused at its start"
            )
        self._check_model("client.predict_public", state)
        return apply(inference.PublicOutputs(self._cohort, public), self._position, tree.tensors(state))

    def gradient(self, state: TensorDict) -> TensorDict:
        """Return the gradient of the first training batch's loss at `state`, over the trainable parameters.

        It is clipped or made private if the run's training is.
        """

        def store(states: TensorDict, grad: Gradient) -> TensorDict:
            g = grad(states["at"], of="at")
            return TensorDict({"at": g, "found": g * -1.0})

        zero = TensorDict({n: torch.zeros_like(t) for n, t in tree.tensors(state).items()}, batch_size=[])
        metrics = dict(self.metrics)
        out = self.fit(
            {"at": state, "found": zero},
            direction=store,
            length=Length(steps=1),
            optimizer=Optimizer.plain(lr=1.0),
        )
        self.metrics = metrics  # the loss of one batch is not a training loss
        return self.parameters(out["found"])

    def parameters(self, state: TensorDict) -> TensorDict:
        """Return the trainable parameters of a model state, without running statistics and frozen parts."""
        return state.select(*(n for n in self._cohort.model.parameters if n in self._trainable))

    def layers(self, part: Collection[str] | None = None, buffers: bool = False) -> Groups:
        """Return the names of a part's (default: the model's) trainable parameters by layer, in module order.

        A layer is a linear or convolution module with the norm that follows it; `buffers` adds running statistics.
        """
        names = set(self._trainable if part is None else part)
        if buffers:
            names |= set(self._cohort.model.buffers)
        groups = layer_groups(self._cohort.model.module, buffers=buffers)
        chosen = (tuple(n for n in group if n in names) for group in groups)
        return tuple(group for group in chosen if group)

    def select(self, part: str) -> tuple[str, ...]:
        """Return the names of a part of the model: head, body, norm, ..."""
        return self._cohort.model.split(part).personal

    def _number(self, of_clients: NDArray[np.int64]) -> Tensor:
        """Return the client's entry of an integer array [clients], 0-d float tensor."""
        numbers = torch.from_numpy(of_clients).to(self._cohort.dtype)
        return numbers[self._position].to(self._cohort.device)

    def _taken(self, length: Length) -> NDArray[np.int64]:
        """Return the steps of every client of the cohort, [clients]."""
        c = self._cohort
        batch, epochs, steps = self.config.resolved(length)
        if isinstance(steps, Tensor):
            raise TailorflError(
                "client.steps() does not take a length with steps=Tensor; use that tensor instead"
            )
        taken = steps_of(c.sizes, batch, epochs, steps, c.min_batch, length.batches)
        return taken if c.limit is None else np.minimum(taken, c.limit // length.batches)
