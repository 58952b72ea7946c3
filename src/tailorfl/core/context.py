"""The information available to a method's server: the models, the public set, the number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.keys import torch_seed


@dataclass(frozen=True)
class Context:
    """The information available to a method's server, from the creation of the first states on."""

    model: Model
    split: Split
    num_clients: int
    train: TrainConfig
    init: TensorDict
    """The shared initial model."""
    seed: int
    task: str = "classification"
    public: Source | None = None
    """Unlabelled samples that the server and every client have."""
    validation: Source | None = None
    """Labelled samples that only the server has."""
    samples: float = 0.0
    """Mean number of training samples of a client."""
    sizes: tuple[int, ...] = ()
    """Training samples of every client."""
    architecture: str = ""
    """Name of this architecture; "" if all clients have the same."""
    siblings: tuple[Context, ...] = ()
    """The contexts of all architectures, if clients have different ones."""

    @property
    def architectures(self) -> Mapping[str, Context]:
        """The context of every architecture by name: a single one if all clients have the same."""
        return {c.architecture: c for c in self.siblings or (self,)}

    @property
    def members(self) -> Tensor:
        """Whether each client 0..num_clients-1 has samples, bool [num_clients]; by default all have.

        A client that was left out (`data.excluded_clients`) keeps its number and has no samples.
        """
        sizes = self.sizes[: self.num_clients] or (1,) * self.num_clients
        return torch.tensor(sizes) > 0

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which the model is trained."""
        first: Tensor = self.init.get(self.split.trainable[0])
        return first.dtype

    def fresh(self, number: int) -> TensorDict:
        """Return another initial model, a different one for every `number`."""
        return self.model.init(torch_seed(self.seed, "another initial model", number))
