"""Terms: what a method adds to the loss of a step, or puts in its place.

    loss = F(batch) + Σ term(batch)                 or  loss = Σ term(batch)  where a term replaces the loss

A term is a function of what a batch shows, written for ONE client:

    def prototypes(seen: Seen, mean: Tensor) -> Tensor:                    # λ/B Σ ‖z_b − mean of its class‖²
        return lam * seen.mean((seen.features - mean[seen.y]).square().mean(1))

    client.fit(w, term=Term(prototypes, given=(mean,)))

It must take what differs between clients through `given`, have no `if` on values, and compute every mean over samples
by `seen.mean`, so that padding counts nothing. Its gradient is clipped and made noisy with that of the loss; privacy of
every sample needs a loss that is a mean of terms of one sample each, so a term that compares samples says `mixes`.

A term on PUBLIC samples (`public` = b' of them a step) is apart: no sample of the client is in it, so it is neither
clipped by sample nor made noisy. The batches are drawn from the client's key; a pass visits the samples in a random
order and in full batches, what does not fill one is left out of that pass. The model is in evaluation mode, and its
norms use the statistics as they stand after the private batch of the step and do not update them.

Tensors of a state that its model does not have (a second head, say) train along with the model; only terms use them, as
`seen.own`. Those that a term `keeps` are moved by what it returns, and by no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import TailorflError
from tailorfl.models.functional import Model
from tailorfl.models.half import widened
from tailorfl.training.objective import Loss, mean_of

Given = Tensor | TensorDict | tuple["Given", ...]
"""The inputs of a term or a direction, of each client."""


class Seen:
    """A term's view of a batch of one client."""

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
        """Of the model in training, [batch, outputs]."""
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
        """Return what a term sees of a batch of a model in evaluation mode."""
        outputs, features = model.with_features(state, batch[0])
        return cls(model, loss, batch, outputs, features, state, rows)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """All tensors of the model in training, and those that train along, by name."""
        return self._state

    def through(self, layer: str, *inputs: Tensor) -> Tensor:
        """Return what a layer of the model in training makes of other inputs, in evaluation mode; gradients flow.

        `layer` is its dotted name.
        """
        with self._model.bound(self._state) as module:
            out: Tensor = widened(module.get_submodule(layer)(*inputs))
        return out

    @property
    def own(self) -> dict[str, Tensor]:
        """The tensors that train along and that the model does not have, by name."""
        return {name: t for name, t in self._state.items() if name not in self._model.sizes}

    @property
    def features(self) -> Tensor:
        """The input of the head of the model in training, [batch, width].

        Raises:
            ModelError: the model has no layer whose input that could be.
        """
        return self._features()

    @property
    def loss(self) -> Tensor:
        """The run's own loss of the batch, 0-d."""
        return self._loss(self.outputs, self.y, self.weight)

    @property
    def rows(self) -> Tensor:
        """The rows of the public set in the batch, [batch] int64; of a term on public samples alone."""
        if self._rows is None:
            raise TailorflError("seen.rows is of public samples; say how many with Term(..., public=...)")
        return self._rows

    def mean(self, per_sample: Tensor) -> Tensor:
        """Return the mean of [batch, ...] numbers over the real samples, [...]; over none it is 0."""
        return mean_of(per_sample, self.weight)

    def of(self, state: TensorDict | Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (outputs, features) of another state of the same architecture on the batch.

        In evaluation mode, and no gradient flows into it.
        """
        # A TensorDict is slow to look into, name by name.
        tensors = cast(dict[str, Tensor], dict(state.items()))
        outputs, features = self._model.outputs_and_features(tensors, self.x)
        return outputs.detach(), features.detach()


@dataclass(frozen=True)
class Term:
    """A term of the loss.

    Attributes:
        function: `function(seen, *given)` returns a 0-d tensor; see `keeps` for the other case.
        given: per-client tensors and TensorDicts that it needs, the same for all or each client's own.
        replaces: the run's loss is left out where one of the terms says so.
        mixes: it compares samples of a batch, so it is no mean of terms of one sample each.
        public: b', samples of the public set a step, at most all of them; None: the client's own batch.
        keeps: names of tensors of the start that the model does not have and that the term itself moves, such as a
            running mean: the function returns (value, {name: new tensor}) and sees the present ones as `seen.own`. No
            gradient moves them, and none flows through what they were.

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
                f"a term on public samples takes at least one of them a step and is added to the loss, but has "
                f"public={self.public}, replaces={self.replaces}, keeps={self.keeps}"
            )

    def value(self, seen: Seen, given: Sequence[Any]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the term of a batch, 0-d, and what becomes of the tensors that it keeps.

        Raises:
            TailorflError: the function does not return just those.
        """
        returned = self.function(seen, *given)
        if not self.keeps:
            return returned, {}
        value, new = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(new, Mapping) or set(new) != set(self.keeps):
            raise TailorflError(
                f"a term that keeps {', '.join(self.keeps)} returns (value, {{name: new tensor}}) with just these names"
            )
        return value, {name: tensor.detach() for name, tensor in new.items()}
