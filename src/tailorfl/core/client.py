"""The client handle: what the client half of a method may use, and the one entrance to local training.

A method's `local` and `personal` are written for ONE client. Under an engine that maps them over a cohort
with `torch.func.vmap`, the handle's operations (`fit`, `loss`) carry their own batching rule
(`torch.autograd.Function.vmap`): they see the whole cohort's physical tensors, train it in one loop and hand
back per-client results. So client code is pure mathematics, and the loop underneath still works in place and
without padding idle clients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import operations, tree
from tailorfl.core.ascent import Ascent, Groups
from tailorfl.core.cohort import Cohort
from tailorfl.core.directed import Directions
from tailorfl.core.distill import Distill
from tailorfl.core.feature_pull import FeaturePull
from tailorfl.core.gradients import Gradient
from tailorfl.core.local_sgd import FitOptions
from tailorfl.core.plan import steps_of
from tailorfl.core.privacy import check_separable
from tailorfl.core.update import PLAIN
from tailorfl.errors import TailorflError
from tailorfl.models.layers import layer_groups
from tailorfl.settings.train import Optimizer, Schedule


class Client:
    """One client inside `local` or `personal`; made by an engine, never by a method."""

    def __init__(self, cohort: Cohort, position: Tensor) -> None:
        self._cohort, self._position = cohort, position
        self.config = cohort.config
        self.split = cohort.split
        self.metrics: dict[str, Tensor] = {}
        """Numbers the client reports by name, 0-d: the mean training loss of each stage, and what a method adds."""
        self.gradients = torch.zeros((), device=cohort.device)
        """Gradients of single samples that its fits computed so far, 0-d."""
        self._trainable = frozenset(cohort.split.trainable)
        self._fits = 0

    @property
    def round(self) -> int:
        """Rounds that the federation took before this one."""
        return self._cohort.round

    @property
    def samples(self) -> Tensor:
        """Number of training samples n_i, 0-d float tensor."""
        return torch.from_numpy(self._cohort.sizes).float()[self._position].to(self._cohort.device)

    def rate(self, own: float | None) -> float | None:
        """Returns a rate of the method's own as it is in this round (`train.round_schedule`).

        None, which stands for the run's rate in `fit`, stays None. `config.lr` has fallen already.
        """
        return None if own is None else own * self.config.decay

    def steps(
        self,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        batches: int = 1,
    ) -> Tensor:
        """Number of SGD steps K a fit with these settings takes, 0-d float tensor."""
        taken = torch.from_numpy(self._taken(epochs, steps, batch_size, batches))
        return taken.float()[self._position].to(self._cohort.device)

    def most_steps(self, epochs: int | None = None, steps: int | None = None) -> int:
        """Returns a number of steps that is enough for a loop of fits of one step each: no client takes more.

        It is that of the clients that happen to run together; what a step does must depend on `steps` alone.
        """
        return int(self._taken(epochs, steps, None, 1).max())

    def fit(
        self,
        start: TensorDict | Mapping[str, TensorDict],
        *,
        train: Collection[str] | None = None,
        prox: tuple[float | Tensor, TensorDict] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | Tensor | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        ascent: Ascent | None = None,
        direction: Directions | None = None,
        given: Sequence[Tensor | TensorDict] = (),
        clip_each: bool = False,
        batches: int = 1,
        public: Distill | None = None,
        pull: FeaturePull | None = None,
        repeat: int = 1,
        first: int = 0,
        purpose: str = "train",
    ) -> Any:
        """Returns `start` after mini-batch training on this client's data; `start` itself is not changed.

        Every fit starts a fresh optimizer and a fresh schedule, also one of several pieces of a training.

        Args:
            start: a full model state, or several named ones that train together on the same batches (with
                `direction`).
            train: names of the parameters to train (default: all that the split does not freeze); modules
                with no trained parameter keep their batch-norm statistics.
            prox: (λ, centre): adds the penalty (λ/2)‖p − centre‖² over the trained parameters.
            epochs, steps: length; steps wins, None takes the run's setting. So many epochs of steps with several
                batches each end with a whole step: its last batches may come from a further pass.
            batch_size, lr, momentum, weight_decay: None takes the run's setting; batch 0 is the whole data
                set; a 0-d tensor as lr may differ by client and round.
            optimizer, schedule: None takes the run's setting; sgd or adamw, constant or linear (to 0 over the
                client's own steps of this fit), see `tailorfl.core.update`.
            ascent: sharpness-aware ascent (SAM, layer-wise SAM) before each gradient.
            direction: `direction(state, grad, *given)` returns what to descend along; `grad(parameters,
                of="", batch=0)` is the batch gradient anywhere. It must take per-client tensors through
                `given`, not by closure. Of several models it moves all together; a mapping with one for each
                lets them take their steps in its order, so that a direction sees the models before its own as
                they are after this step, whatever the optimizer, and returns what its own descends along.
            clip_each: the run's clip bounds each gradient that the direction asks for, in place of what the
                direction, the pull and the other terms add up to.
            batches: independent batches that every step draws for `direction`, which asks for them by their
                number; the loss that is reported is that of the first gradient of a step.
            public: adds λ · the mean of ‖softmax(f(x)) − target(x)‖² over a batch of the public set to the
                loss of every step, with the model in evaluation mode. Public data need no privacy, so the
                gradient of this term is neither clipped by sample nor made noisy.
            pull: adds λ · the distance of the model's features on a step's batch from those of a fixed model. The term
                looks at private samples: it is clipped and made noisy with the loss.
            repeat: steps on each batch (all of them, where a step has several) before the next is drawn.
            first: how many batches of this purpose's sequence to skip.
            purpose: which random sequence of batches; fits of equal purpose see the same batches in a round,
                except with privacy noise, where each draws its own.

        Raises:
            ClientError: training failed; names client, round and stage.
            ConfigError: momentum with adamw.
            TailorflError: other arguments that do not fit together.
        """
        components = {"": start} if isinstance(start, TensorDict) else dict(start)
        if batches != 1 and (batches < 1 or direction is None):
            raise TailorflError(
                f"fit() got batches={batches}; it is at least 1, and a step with more than one needs a "
                "`direction` that asks for them with grad(parameters, batch=...)"
            )
        if public is not None:
            public.check(self._cohort.public)
            if len(components) > 1:
                raise TailorflError("fit(public=...) trains one model at a time, but got several")
            public = public if public.strength > 0 else None
        if pull is not None:
            if len(components) > 1:
                raise TailorflError("fit(pull=...) trains one model at a time, but got several")
            pull = pull if pull.strength > 0 else None
        if isinstance(direction, Mapping) and set(direction) != set(components):
            raise TailorflError(
                f"fit() got directions for {', '.join(direction) or 'nothing'}, but trains "
                f"{', '.join(components) if any(components) else 'one model'}; give one direction for each model, "
                "or a single one"
            )
        if clip_each and direction is None:
            raise TailorflError("fit(clip_each=True) clips what a `direction` asks for, but none was given")
        if ascent is not None:
            if direction is not None:
                raise TailorflError("fit() takes either `ascent` or `direction`, not both")
            direction, given = ascent.direction, ascent.given(given)
        wanted = set(self.split.trainable if train is None else train)
        names = tuple(n for n in self._cohort.model.parameters if n in wanted)
        config = self.config
        epochs, steps = self._length(epochs, steps)
        strength = prox[0] if prox is not None else None
        own: dict[str, Any] = {
            "lr": None if isinstance(lr, Tensor) else lr,
            "optimizer": optimizer,
            "schedule": schedule,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        options = FitOptions(
            trained=tuple(names for _ in components),
            components=tuple(components),
            rule=replace(config.rule, **{key: value for key, value in own.items() if value is not None}),
            clip=config.clip,
            clip_each=clip_each,
            repeat=repeat,
            batches=batches,
            prox=None if isinstance(strength, Tensor) else strength,
            direction=direction,
            dp=config.dp,
            number=self._fits,
        )
        self._fits += 1
        if not names or (epochs == 0 and steps is None) or steps == 0 or self._cohort.limit == 0:
            return start if isinstance(start, TensorDict) else dict(start)
        call = operations.Fit(self._cohort, options, purpose, self._batch(batch_size), epochs, steps, first)
        moving = self._cohort.model.trained_buffers(names)
        if config.dp is not None:
            check_separable(self._cohort.loss, moving, pull)
        flat: list[Tensor] = []
        changing = {*names, *moving}
        for state in components.values():
            call.fixed_names = tuple(str(n) for n in state.keys() if n not in changing)  # noqa: SIM118
            flat += [state.get(n) for n in names + moving + call.fixed_names]
        call.moving_names = moving
        if prox is not None:
            centre: Mapping[str, Any] = {"": prox[1]} if isinstance(start, TensorDict) else prox[1]
            absent = [n for c in components for n in names if n not in centre[c].keys()]  # noqa: SIM118
            if absent:
                raise TailorflError(
                    f"the centre of prox lacks {', '.join(absent[:5])}, which is trained; give the whole model "
                    "as its centre, or name with `train` what the centre has"
                )
            flat += [centre[c].get(n) for c in components for n in names]
            call.centred = True
            if isinstance(strength, Tensor):
                flat.append(strength)
                call.strong = True
        if isinstance(lr, Tensor):
            flat.append(lr)
            call.rated = True
        for item in given:
            parts = list(tree.leaves(item)) if isinstance(item, TensorDict) else [("", item)]
            call.given_paths.append(None if isinstance(item, Tensor) else tuple(p for p, _ in parts))
            flat += [t for _, t in parts]
        if pull is not None:
            call.pull = replace(pull, centre=tree.empty())  # its tensors travel with the others
            call.anchor_names = tuple(str(n) for n in pull.centre.keys())  # noqa: SIM118
            flat += [pull.centre.get(n) for n in call.anchor_names]
        if public is not None:
            call.public = replace(public, targets=torch.empty(0))  # the tensor travels with the others
            flat.append(public.targets)
        result = operations.apply(call, self._position, *flat)
        self.metrics[purpose], self.gradients = result[0], self.gradients + result[1]
        return call.rebuild(components, result[2:], isinstance(start, TensorDict))

    def loss(self, state: TensorDict, part: str = "train") -> Tensor:
        """Returns the mean loss of a model state on this client's `part` ("train" or "val"), 0-d tensor.

        The model is in evaluation mode; the mean over an empty part is 0.

        Raises:
            TailorflError: under sample-level privacy, which does not cover a look without noise.
        """
        if self.config.dp is not None:
            raise TailorflError(
                f"client.loss(..., '{part}') looks at a client's {part} samples without noise, which sample-level "
                "privacy does not cover; train without train.dp, or with train.dp.level=client"
            )
        names = tuple(str(n) for n in state.keys())  # noqa: SIM118
        call = operations.Loss(self._cohort, part, names)
        return operations.apply(call, self._position, *[state.get(n) for n in names])[0]

    def predict_public(self, state: TensorDict) -> Tensor:
        """Returns the outputs (logits) of a model state on the public set, float [P, outputs].

        The model is in evaluation mode.

        Raises:
            TailorflError: the federation has no public set.
        """
        public = self._cohort.public
        if public is None:
            raise TailorflError(
                "predict_public() needs a public set, but the federation has none; set `needs_public` of the "
                "method so that a run says so at its start"
            )
        names = tuple(str(n) for n in state.keys())  # noqa: SIM118
        call = operations.PublicOutputs(self._cohort, public, names)
        return operations.apply(call, self._position, *[state.get(n) for n in names])[0]

    def gradient(self, state: TensorDict) -> TensorDict:
        """Returns the gradient of the first training batch's loss at `state`, over the trainable parameters.

        Clipped or made private where the run's training is.
        """

        def store(states: TensorDict, grad: Gradient) -> TensorDict:
            g = grad(states["at"], of="at")
            return TensorDict({"at": g * 0.0, "found": g * -1.0}, batch_size=[])

        zero = TensorDict({n: torch.zeros_like(t) for n, t in tree.tensors(state).items()}, batch_size=[])
        metrics = dict(self.metrics)
        out = self.fit({"at": state, "found": zero}, direction=store, steps=1, lr=1.0, **PLAIN)
        self.metrics = metrics  # the loss of this one batch is not the loss of a training
        return self.parameters(out["found"])

    def parameters(self, state: TensorDict) -> TensorDict:
        """Returns the trainable parameters of a model state, without running statistics and frozen parts."""
        return state.select(*(n for n in self._cohort.model.parameters if n in self._trainable))

    def layers(self, part: Collection[str] | None = None, buffers: bool = False) -> Groups:
        """Returns the names of the trainable parameters by layer, in module order, of a `part` of the model or all.

        A layer is a linear or convolution module with the norm that follows it; `buffers` adds running statistics.
        """
        wanted = set(self._trainable if part is None else part)
        if buffers:
            wanted |= set(self._cohort.model.buffers)
        groups = layer_groups(self._cohort.model.module, buffers=buffers)
        found = (tuple(n for n in group if n in wanted) for group in groups)
        return tuple(group for group in found if group)

    def select(self, part: str) -> tuple[str, ...]:
        """Returns the names of a part of the model: head, body, norm, ..."""
        return self._cohort.model.split(part).personal

    def _taken(
        self, epochs: int | None, steps: int | None, batch_size: int | None, batches: int
    ) -> NDArray[np.int64]:
        """The steps of every client of the cohort, [clients]."""
        c = self._cohort
        epochs, steps = self._length(epochs, steps)
        taken = steps_of(c.sizes, self._batch(batch_size), epochs, steps, c.min_batch, batches)
        return taken if c.limit is None else np.minimum(taken, c.limit // batches)

    def _batch(self, batch_size: int | None) -> int:
        return self.config.batch_size if batch_size is None else batch_size

    def _length(self, epochs: int | None, steps: int | None) -> tuple[int | None, int | None]:
        if epochs is None and steps is None:
            epochs, steps = self.config.epochs, self.config.steps
        return (None, steps) if steps is not None else (epochs, None)
