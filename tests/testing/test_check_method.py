"""`check_method` finds what an author may get wrong, and names the check; right methods of outside pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl import Client, Context, Method, Replies
from tailorfl.settings.train import PrivacyLevel
from tailorfl.testing import (
    Check,
    Contract,
    check_method,
    checks_of,
    nothing,
    parametrize_with_checks,
    twice,
    whole,
)
from tailorfl.testing.contract import CHECKS
from tailorfl.training import tree


class Plain(Method):
    """FedAvg and a personal copy of what was last trained."""

    name = "plain_of_a_test"
    title = "Plain"
    paper = "none"
    models_trained = 2
    lam: float = Field(0.5, ge=0)

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> Any:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(received)
        return client.fit(state, prox=(self.lam, received)), theta

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return received


PROMISED: dict[str, Any] = {"down": whole, "up": whole, "trained": twice, "personal": True, "shared": True}


@pytest.mark.slow  # the library's own methods pass them in tests/methods/test_method_contract.py
@parametrize_with_checks(Contract(Plain(), **PROMISED))
def test_a_right_method_passes_each_check(check: Check) -> None:
    check()


class Drawing(Plain):
    """Noise of a global generator."""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean() + torch.rand(()) * 1e-3


class FirstClient(Plain):
    """The first client of the cohort counts twice."""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        first = {
            n: (t[0] + t.mean(0)) / 2 for n, t in tree.tensors(replies.stack).items() if t.is_floating_point()
        }
        return tree.merge(replies.mean(), TensorDict(first))


class MeanOnly(FirstClient):
    """As before, and it says that it needs nothing but the mean."""

    @property
    def averages_replies(self) -> bool:
        return True


class Stale(Plain):
    """A newcomer keeps the model that was drawn."""

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return state


class Peeking(Plain):
    """A step of the size of a loss that no privacy covers."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(received)
        return client.fit(state, prox=(client.loss(received), received)), theta


class Owning(Peeking):
    """As before, and it says so."""

    def unprotected(self, level: PrivacyLevel) -> str:
        return "the loss of the received model" if level == "sample" else ""


class Greedy(Plain):
    """Sends the personal model too."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        state, theta = super().local(client, state, received)
        return state, TensorDict({"theta": theta, "v": state})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        mean: TensorDict = replies.mean()["theta"]
        return mean


class Opinionated(Plain):
    """Weighs clients equally, whatever the run says."""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return tree.weighted_mean(
            replies.stack, torch.full((len(replies.clients),), 1 / len(replies.clients))
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "check"),
    [
        (Drawing(), "engines_agree|reruns_are_bit_identical"),
        (FirstClient(), "relabelling_clients|client_privacy_without"),
        (MeanOnly(), "relabelling_clients|client_privacy_without"),
        (Stale(), "newcomers_without_steps"),
        (Peeking(), "sample_privacy_without|uses a client's"),
        (Greedy(), "traffic_is_what_was_promised"),
        (Opinionated(), "the_runs_weights"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_a_wrong_one_is_found(method: Method, check: str) -> None:
    with pytest.raises(Exception, match=check):
        check_method(Contract(method, **PROMISED))


@pytest.mark.slow
def test_one_that_owns_up_to_a_look_is_refused_privacy_and_passes() -> None:
    check_method(Owning)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"up": nothing}, "traffic_is_what_was_promised"),
        ({"trained": whole}, "trained_scalars_are_those_promised"),
        ({"personal": False}, "evaluated_models_are_those_promised"),
        ({"unweighted": True}, "the_runs_weights_are_those_of_a_method_that_has_none_of_its_own"),
    ],
)
def test_each_promise_is_held(wrong: dict[str, Any], name: str) -> None:
    (check,) = (c for c in checks_of(Contract(Plain(), **{**PROMISED, **wrong})) if c.name == name)
    with pytest.raises(AssertionError):
        check()


def test_every_check_says_what_it_holds_and_has_a_name_of_its_own() -> None:
    names = [str(check) for check in checks_of(Plain)]
    assert len(set(names)) == len(names) > 30
    assert all((function.__doc__ or "").strip() for function, *_ in CHECKS)
