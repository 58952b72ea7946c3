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
"""Option, dotted where it lies in a group (distil.lr) -> values that tuning tries."""

Family = Literal[
    "", "baseline", "one model", "tuned", "two models", "parts", "mixture", "hypernet", "knowledge", "trees"
]
"""What kind of a method it is: no federation or no privacy of data; one model for all; that, tuned on each client; a
personal model beside a global one; a model in shared and personal parts; mixtures of models of clients; a network that
makes models; predictions, prototypes or neighbours in place of weights; decision trees in place of networks. "" where
nobody says.
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
    """What it is good for, in some words."""
    grid: ClassVar[Grid] = {}
    """Values of its options that `tailorfl tune` tries beside those of training: its paper's, or around them."""
    has_personal: ClassVar[bool] = True
    has_global: ClassVar[bool] = True
    models_trained: ClassVar[int] = 1
    """How many models one client optimises in a round (two where a personal one is trained beside a global one)."""
    trained_twice: ClassVar[str] = ""
    """The part of a model of which each client trains a second one beside it, such as head; "": none."""
    pooled: ClassVar[bool] = False
    """Whether the method sees all training data in one place (a reference, not federated learning)."""
    heterogeneous: ClassVar[bool] = False
    """Whether clients may have different architectures: no message mixes the weights of two."""
    of_networks: ClassVar[bool] = True
    """Whether it trains the run's model; if not, it brings one of another kind and is a reference beside networks."""
    of_adapters: ClassVar[bool] = False
    """Whether the method is made for the LoRA or adapters of a model whose other weights are frozen."""
    answers: ClassVar[bool] = False
    """Whether a deployed model answers with what `answering` returns, and not by a pass through it alone."""
    special_cases: ClassVar[Sequence[SpecialCase]] = ()
    """Settings under which the method is another one, see `tailorfl.core.reduction`; the first counts that says it."""
    exposures: ClassVar[Sequence[Exposure]] = ()
    """What is made of private data that privacy does not cover, under which settings, the first that holds counts."""
    fixed_clients: ClassVar[str] = ""
    """Why no client can join rounds that have begun, such as "its server keeps a model of every client"; "" if one can.

    A newcomer is numbered after the clients that are there and begins with `client_state`; what the method keeps and
    sends must not depend on how many clients there were before.
    """
    fixed_when: ClassVar[Mapping[str, Any]] = {}
    """Under which conditions that holds, as of `exposure`; by default always."""
    personal_receives: ClassVar[bool] = True
    """Whether `personal` looks at what the client receives; if not, evaluation sends it nothing."""

    weights: Weights | None = Field(
        default=None, description="what clients count in averages; null: as the run says"
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
                f"make another one with {cls.__name__}({name}=...)"
                if name in cls.model_fields
                else "return what a client keeps as the new state of local() (it starts from client_state()), what the "
                "server keeps from aggregate() (from server_state()), and put numbers to look at into client.metrics"
            )
            raise ClientError(
                f"{cls.__name__}: self.{name} cannot be set: a method does not change, since its clients run at "
                f"once and in any order; {remedy}"
            ) from error

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        """Every length `..._epochs` may have a `..._steps` that takes its place: only one of the two is given."""
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
        """Return every option with its value as plain values, from which `make_method` makes an equal method.

        A length in epochs is left out where one in steps takes its place.
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
        """Names of the options that the length of the server's own step depends on, for messages."""
        return tuple(n for n in type(self).model_fields if n in _OF_SERVER or n.startswith("server_"))

    @property
    def needs_public(self) -> bool:
        """Whether the method looks at the public set."""
        return False

    @property
    def averages_replies(self) -> bool:
        """Whether `aggregate` needs of the replies their uniform mean and their number, and nothing else.

        Client-level privacy then has to hide the mean alone; else it puts more noise into every single reply.
        """
        return False

    @property
    def individual_start(self) -> bool:
        """Whether every client draws an initial model of its own; `client_state` then sees it as `ctx.init`."""
        return False

    def length(self, of: str) -> Length:
        """Return how long a part of training is, by the options `{of}_epochs` and, where there is one, `{of}_steps`."""
        return Length(epochs=getattr(self, f"{of}_epochs"), steps=getattr(self, f"{of}_steps", None))

    @property
    def personal_training(self) -> Mapping[str, Any]:
        """How personal models train, as changes of the run's training settings."""
        return {}

    def weighting(self, run: Weights) -> Weights:
        """Return what clients count in averages where the run says `run`: its own `weights`, if it was given any."""
        return self.weights or run

    def sampled(self, run: Sampling) -> Sampling:
        """Return how clients are sampled where the run says `run`: the same, but for methods that are an order."""
        return run

    def wrap(self, model: Model) -> Model:
        """Return the model that clients train and deploy, where the method changes its structure."""
        return model

    def check_source(self, source: Source) -> None:
        """Check that the method can have samples and targets of this kind. Raises ConfigError if it cannot."""

    def make_model(self, model: Model, source: Source) -> Model:
        """Return the model that clients train and deploy on samples of a source; by default what `wrap` makes of it."""
        return self.wrap(model)

    def make_split(self, model: Model) -> Split:
        """Return what is shared and what stays personal; by default everything is shared."""
        return model.split()

    def server_state(self, ctx: Context) -> TensorDict:
        """Return the server's state before the first round."""
        return tree.empty()

    def client_state(self, ctx: Context) -> TensorDict:
        """Return the private state every client starts with."""
        return tree.empty()

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        """Return what goes down: one payload for all, or several.

        Several are `PerClient` ones in the order of `clients`, or `PerArchitecture` ones.
        """
        return tree.empty()

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> Broadcast:
        """Return what goes down to clients that join late; by default what all clients get in this round.

        A method whose rounds do not all send something says here what a client that missed the others needs.
        """
        return self.broadcast(server, clients)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Return (new private state, reply) of one client."""
        raise TypeError(f"{type(self).__name__} does not define local()")

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        """Return the server's state after the round."""
        return server

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        """Return what replies are measured from: a client's update is its reply minus these entries, by path.

        Client-level privacy bounds the updates. By default that is what the client received; a reply that is a change
        already has none. Where clients received different things, entries have a leading client axis.
        """
        return received

    def unprotected(self, level: PrivacyLevel) -> str:
        """Return what is made of private data that privacy of this level does not cover; "" if it covers all."""
        return next((exposed for exposure in self.exposures if (exposed := exposure.of(self, level))), "")

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        """Return which other methods this one is with its settings in a run, nothing where it is itself.

        What holds of a method whatever its settings (FedSim is FedPer with uniform weights) is not said here.
        """
        reductions: dict[tuple[str, ...], Reduction] = {}
        for reduction in (r for case in self.special_cases for r in case.of(self, run)):
            if (reduction.model, "", "") in reductions:
                continue  # a model that is never trained is no other method's
            reductions.setdefault((reduction.model, reduction.other, reduction.remark), reduction)
        return tuple(reductions.values())

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return the deployable model of one client: all its metrics and exports are of this one."""
        return received

    def answering(self, memory: Memory) -> nn.Module:
        """Return what makes a client's answers (methods with `answers`).

        It is a module that is called with the outputs [rows, outputs] and the features [rows, width] of samples and
        returns their answers [rows, outputs].

        `memory` is what the client's deployed model makes of its own samples. What the answers need of it is in buffers
        of the module, so that it can leave the run beside the model.
        """
        raise TypeError(f"{type(self).__name__} does not define answering()")

    def shared(self, server: TensorDict) -> TensorDict | PerArchitecture:
        """Return the global model in the server's state (methods with `has_global`), or one an architecture."""
        return server

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return the private state of a client that joins late, from the start and what it receives."""
        return state


_OF_SERVER = ("server", "beta", "gamma", "distil", "global_lr")
_REGISTRY: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Add a method class under its `name`; a class decorator."""
    registered = _REGISTRY.get(method.name)
    if registered is not None and registered is not method:
        raise ConfigError(
            f"two methods are called '{method.name}': {registered.__qualname__} and {method.__qualname__}"
        )
    _REGISTRY[method.name] = method
    return method


def methods() -> dict[str, type[Method]]:
    """Return the methods that train networks by name."""
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
        except Exception as error:  # whatever a stranger's module raises must not stop the others
            log.warning("the methods of '%s' are left out: %s: %s", entry.value, type(error).__name__, error)
            continue
        if isinstance(loaded, type) and issubclass(loaded, Method):
            register(loaded)
        elif not isinstance(loaded, ModuleType):
            log.warning("'%s' is neither a method nor a module with methods and is left out", entry.value)


def check_aggregates(method: Method) -> None:
    """Check that the global model of a method, if it has one, can change. Raises ConfigError if it cannot."""
    if method.has_global and type(method).aggregate is Method.aggregate:
        raise ConfigError(
            f"{type(method).__name__} defines no aggregate(server, replies), so that no round would change its global "
            "model: return the server's new state there, such as replies.mean(), or set "
            "has_global: ClassVar[bool] = False if the method has no global model"
        )


def needs_public(method: Method) -> ConfigError:
    """Return the error that says that a method lacks its public set."""
    return ConfigError(
        f"{method.title} needs a public set, unlabelled samples that the server and all clients have; name one, "
        "such as data.public=digits (with the same source as data.name, a tenth of its training samples)"
    )


def needs_one_architecture(method: Method, names: Sequence[str]) -> ConfigError:
    """Return the error that says that a method cannot mix architectures."""
    able = ", ".join(sorted(n for n, m in methods().items() if m.heterogeneous))
    return ConfigError(
        f"{method.title} exchanges or averages the weights of models, so all clients need the same "
        f"architecture, but there are {len(names)}: {', '.join(names)}; methods that allow several: {able}"
    )


def find_method(name: str) -> type[Method]:
    """Return a method by its name, or as `module:Class` one of a module that was named (`tailorfl.modules`).

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if ":" in name:
        cls = modules.find(name)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ConfigError(
                f"method '{name}' should be a class made from tailorfl.Method, but is {shown(cls)}"
            )
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
