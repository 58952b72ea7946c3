"""The interface of a method: the mathematics of ONE client and of the server, and nothing else.

A method never learns which engine runs it, how many clients run at once, or where states live. Its fields are
its hyper-parameters; a run gives it everything else.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tensordict import TensorDict
from torch import nn

from tailorfl import modules
from tailorfl.core.answers import Memory
from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Broadcast, PerArchitecture, Replies
from tailorfl.core.reduction import Exposure, Reduction, RunSetup, SpecialCase, check_conditions
from tailorfl.data.source import Source
from tailorfl.errors import ClientError, ConfigError, unknown
from tailorfl.interface import check_hooks, check_kind
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.printable import shown
from tailorfl.settings.experiment import Sampling, Weights
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.plan import Length

log = logging.getLogger(__name__)

Grid = Mapping[str, Sequence[Any]]
"""Option, dotted if it belongs to a group (distil.lr) -> values that tuning tries."""

Family = Literal[
    "", "baseline", "one model", "tuned", "two models", "parts", "mixture", "hypernet", "knowledge", "trees"
]
"""The kind of method: no federation or no privacy of data; one model for all; one model, tuned on each client; a
personal model in addition to a global one; a model with shared and personal parts; mixtures of the clients' models; a
network that generates models; predictions, prototypes or neighbours instead of weights; decision trees instead of
networks. "" if it is not declared.
"""


class Method(BaseModel):
    """Base of every method. Fields of a subclass are its hyper-parameters; unknown ones are refused.

    States and messages are TensorDicts. `local` and `personal` must be pure: they run under
    `torch.func.vmap`, so they use tensor arithmetic and the client's operations, never Python conditions on
    tensor values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[Family] = ""
    use: ClassVar[str] = ""
    """Its purpose, in a few words."""
    grid: ClassVar[Grid] = {}
    """Values of its options that `tailorfl tune` tries along with training options: its paper's, or ones near them."""
    has_personal: ClassVar[bool] = True
    has_global: ClassVar[bool] = True
    models_trained: ClassVar[int] = 1
    """Number of models one client optimises in a round (two if it trains a personal and a global one)."""
    trained_twice: ClassVar[str] = ""
    """The part of a model of which each client trains a second copy, such as head; "": none."""
    pooled: ClassVar[bool] = False
    """Whether the method sees all training data in one place (a reference, not federated learning)."""
    heterogeneous: ClassVar[bool] = False
    """Whether clients may have different architectures: no message mixes the weights of two."""
    of_networks: ClassVar[bool] = True
    """Whether it trains the run's model; if not, it trains a model of another kind, as a reference for networks."""
    of_adapters: ClassVar[bool] = False
    """Whether the method is made for LoRA or adapters in a model whose other weights are frozen."""
    answers: ClassVar[bool] = False
    """Whether a deployed model's answers come from the module that `answering` returns, not from its outputs alone."""
    special_cases: ClassVar[Sequence[SpecialCase]] = ()
    """Settings under which the method equals another (`tailorfl.core.reduction`); of duplicates the first counts."""
    exposures: ClassVar[Sequence[Exposure]] = ()
    """Uses of private data that privacy does not cover, each with its settings; the first that holds counts."""
    fixed_clients: ClassVar[str] = ""
    """Why no client can join a running federation, such as "its server keeps a model of every client"; "" if one can.

    A client that joins is numbered after the existing ones and begins with `client_state`; the method's states and
    messages must not depend on how many clients there were before.
    """
    fixed_when: ClassVar[Mapping[str, Any]] = {}
    """The conditions under which `fixed_clients` holds, as in `exposure`; by default always."""
    personal_receives: ClassVar[bool] = True
    """Whether `personal` uses the message that the client receives; if not, evaluation sends it nothing."""
    sends_updates: ClassVar[bool] = True
    """Whether every reply starts from `anchor`. If not, attacks that multiply an update are refused."""
    replies_change: ClassVar[bool] = False
    """Whether replies get other entries once the server's state has changed; buffered rounds cannot mix the two."""

    weights: Weights | None = Field(
        default=None, description="weights of clients in averages; null: those of the run"
    )
    participation: Literal["sampled", "all"] = Field(
        default="sampled", description="which clients train in a round; only the sampled ones are aggregated"
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        check_hooks(cls, Method, Method.__class_vars__)
        fixed = Exposure(cls.fixed_clients, None, cls.fixed_when)
        check_conditions(cls, [*cls.special_cases, *cls.exposures, fixed])

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValueError as error:
            cls = type(self)
            remedy = (
                f"create a new one with {cls.__name__}({name}=...)"
                if name in cls.model_fields
                else (
                    "return a client's state from local() (it starts as client_state()) and the server's state from "
                    "aggregate() (it starts as server_state()), and put numbers to report into client.metrics"
                )
            )
            raise ClientError(
                f"{cls.__name__}: self.{name} cannot be set, since clients run at the same time and in any order; "
                f"{remedy}"
            ) from error

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        """Check that a length is given as `..._epochs` or as `..._steps`, not as both."""
        for steps in self.model_fields_set:
            epochs = steps.removesuffix("_steps") + "_epochs"
            if (
                steps.endswith("_steps")
                and epochs in self.model_fields_set
                and getattr(self, steps) is not None
            ):
                raise ValueError(f"has both {epochs} and {steps}; give one of them")
        return self

    def all_options(self) -> dict[str, Any]:
        """Return all options as plain values, from which `make_method` makes an equal method.

        A length in epochs is left out if one in steps replaces it.
        """
        plain = self.model_dump(mode="json")
        in_steps = {
            n.removesuffix("_steps") for n, v in plain.items() if n.endswith("_steps") and v is not None
        }
        return {
            n: v
            for n, v in plain.items()
            if n.removesuffix("_epochs") not in in_steps or not n.endswith("_epochs")
        }

    @property
    def reaches_all(self) -> bool:
        """Whether every client receives the broadcast of a round, not only those that train in it."""
        return False

    @property
    def server_settings(self) -> tuple[str, ...]:
        """Names of the options that the size of the server's own step depends on, for messages."""
        return tuple(n for n in type(self).model_fields if n in _OF_SERVER or n.startswith("server_"))

    @property
    def needs_public(self) -> bool:
        """Whether the method uses the public set."""
        return False

    @property
    def averages_replies(self) -> bool:
        """Whether `aggregate` uses only the uniform mean and the number of the replies.

        Client-level privacy then has to protect only the mean; otherwise it puts more noise into every single reply.
        """
        return False

    @property
    def individual_start(self) -> bool:
        """Whether every client draws its own initial model, which `client_state` then sees as `ctx.init`."""
        return False

    def length(self, of: str) -> Length:
        """Return the length of a part of training, from the options `{of}_epochs` and, if it exists, `{of}_steps`."""
        return Length(epochs=getattr(self, f"{of}_epochs"), steps=getattr(self, f"{of}_steps", None))

    @property
    def personal_training(self) -> Mapping[str, Any]:
        """Changes to the run's training settings with which personal models train."""
        return {}

    def weighting(self, run: Weights) -> Weights:
        """Return how clients are weighted in averages: by the method's own `weights` if set, else as in the run."""
        return self.weights or run

    def sampled(self, run: Sampling) -> Sampling:
        """Return how clients are sampled: as in the run, except in methods that define their own order."""
        return run

    def wrap(self, model: Model) -> Model:
        """Return the model that clients train and deploy; for methods that change its structure."""
        return model

    def check_source(self, source: Source) -> None:
        """Raise ConfigError if the method cannot use samples and targets of this kind."""

    def make_model(self, model: Model, source: Source) -> Model:
        """Return the model that clients train and deploy on samples of a source; by default `wrap(model)`."""
        return self.wrap(model)

    def make_split(self, model: Model) -> Split:
        """Return which parts are shared and which are personal; by default everything is shared."""
        return model.split()

    def server_state(self, ctx: Context) -> TensorDict:
        """Return the server's state before the first round."""
        return tree.empty()

    def client_state(self, ctx: Context) -> TensorDict:
        """Return the private state every client starts with."""
        return tree.empty()

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        """Return the broadcast: one payload for all, or several.

        Several are `PerClient` ones in the order of `clients`, or `PerArchitecture` ones.
        """
        return tree.empty()

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        """Return the broadcast to clients that join late; by default the one that all clients get in this round.

        A method that does not send everything in every round returns here what a late client has missed.
        """
        return self.broadcast(server, clients)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Return (new private state, reply) of one client."""
        raise TypeError(f"{type(self).__name__} does not define local()")

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        """Return the server's state after the round."""
        return server

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        """Return the reference point of replies: a client's update is its reply minus these entries, by path.

        Client-level privacy bounds the updates. The default is the message that the client received; a reply that is
        already a change has no entry. If clients received different messages, entries have a leading client axis.
        """
        return received

    def unprotected(self, level: PrivacyLevel) -> str:
        """Return the use of private data that privacy of this level does not cover; "" if it covers all."""
        return next((exposed for exposure in self.exposures if (exposed := exposure.of(self, level))), "")

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        """Return the other methods that this one equals with its settings in a run; () if there are none.

        Equalities that hold whatever the settings (FedSim is FedPer with uniform weights) are not included.
        """
        reductions: dict[tuple[str, ...], Reduction] = {}
        for reduction in (r for case in self.special_cases for r in case.of(self, run)):
            if (reduction.model, "", "") in reductions:
                continue  # a model that is never trained is not compared with other methods
            reductions.setdefault((reduction.model, reduction.other, reduction.remark), reduction)
        return tuple(reductions.values())

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return the deployable model of one client; all its metrics and exports are of this model."""
        return received

    def answering(self, memory: Memory) -> nn.Module:
        """Return the module that makes a client's answers (methods with `answers`).

        It is called with the outputs [rows, outputs] and the features [rows, width] of samples and returns their
        answers [rows, outputs].

        `memory` has the outputs and features of the client's own samples in its deployed model. The module keeps what
        it needs of them in buffers, so that it can be exported with the model.
        """
        raise TypeError(f"{type(self).__name__} does not define answering()")

    def shared(self, server: TensorDict) -> TensorDict | PerArchitecture:
        """Return the global model in the server's state (methods with `has_global`), or one per architecture."""
        return server

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return the private state of a client that joins late, from its initial state and the message it receives."""
        return state


_OF_SERVER = ("server", "beta", "gamma", "distil", "global_lr")
_REGISTRY: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Add a method class under its `name`; a class decorator."""
    registered = _REGISTRY.get(method.name)
    if registered is not None and registered is not method:
        raise ConfigError(
            f"two methods have the name '{method.name}': {registered.__qualname__} and {method.__qualname__}"
        )
    _REGISTRY[method.name] = method
    return method


def methods() -> dict[str, type[Method]]:
    """Return the methods that train networks, by name."""
    return {name: method for name, method in all_methods().items() if method.of_networks}


def all_methods() -> dict[str, type[Method]]:
    """Return all methods by name: those of the folder `tailorfl/methods`, and those of installed packages.

    The folder is imported at the first call, not with the package. A package adds methods by an entry point of the
    group `tailorfl.methods`: a Method class, or a module that registers some. One that cannot be loaded is named in a
    warning and left out.
    """
    importlib.import_module("tailorfl.methods")
    _load_entry_points()
    return dict(sorted(_REGISTRY.items()))


@functools.cache
def _load_entry_points() -> None:
    for entry in entry_points(group="tailorfl.methods"):
        try:
            loaded: Any = entry.load()
        except Exception as error:  # no error of another package's module may stop the others
            log.warning(
                "the methods of '%s' cannot be loaded: %s: %s", entry.value, type(error).__name__, error
            )
            continue
        if isinstance(loaded, type) and issubclass(loaded, Method):
            register(loaded)
        elif not isinstance(loaded, ModuleType):
            log.warning("'%s' is neither a method nor a module with methods and is ignored", entry.value)


def check_aggregates(method: Method) -> None:
    """Check that the global model of a method, if it has one, can change. Raises ConfigError if it cannot."""
    if method.has_global and type(method).aggregate is Method.aggregate:
        raise ConfigError(
            f"{type(method).__name__} defines no aggregate(server, replies), so no round would change its global "
            "model; define it to return the server's new state, such as replies.mean(), or set has_global: "
            "ClassVar[bool] = False if the method has no global model"
        )


def needs_public(method: Method) -> ConfigError:
    """Return the error for a method that lacks its public set."""
    return ConfigError(
        f"{method.title} needs a public set, unlabelled samples that the server and all clients have; set data.public, "
        "such as data.public=digits (with the same source as data.name, a tenth of the training samples)"
    )


def needs_one_architecture(method: Method, names: Sequence[str]) -> ConfigError:
    """Return the error for a method that cannot mix architectures."""
    able = ", ".join(sorted(n for n, m in methods().items() if m.heterogeneous))
    return ConfigError(
        f"{method.title} exchanges or averages the weights of models, so all clients need the same "
        f"architecture, but there are {len(names)}: {', '.join(names)}; methods that allow several: {able}"
    )


def find_method(name: str) -> type[Method]:
    """Return a method by its name, or by `module:Class` from a module that the user has named (`tailorfl.modules`).

    Raises:
        ConfigError: no such method; names the nearest.
    """
    if ":" in name:
        cls = modules.find(name)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ConfigError(f"method '{name}' should be a subclass of tailorfl.Method, but is {shown(cls)}")
        for attribute, value in (("name", name), ("title", cls.__name__), ("paper", "")):
            if not hasattr(cls, attribute):
                setattr(cls, attribute, value)
        return cls
    registered = all_methods()
    if name not in registered:
        raise unknown("method", name, registered)
    return registered[name]


def make_method(name: str, options: dict[str, Any] | None = None) -> Method:
    """Return a method with its hyper-parameters.

    Raises:
        ConfigError: unknown method, unknown or invalid hyper-parameter; names the nearest valid one.
    """
    check_kind("method", name, str)
    check_kind("options of a method", options, None, Mapping)
    cls = find_method(name)
    options = dict(options or {})
    for key in options:
        if key not in cls.model_fields:
            raise unknown(f"option of {name}", key, cls.model_fields)
    try:
        return cls(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"method '{name}': {option} = {shown(first['input'])}: {first['msg']}") from None
