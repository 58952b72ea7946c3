"""Terms of a method's own: their gradients against plain torch, both engines, what they see, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from tailorfl.errors import ModelError, TailorflError
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Seen, Term
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    model_of,
    run,
    source,
)

CLIENTS = len(SIZES)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def setting(name: str = "mlp", **options: Any) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    shape = {"hidden": (6,), "activation": "tanh"} if name == "mlp" else {}
    model = model_of(name, data, **shape)
    return cohort_of(model, data, **options), model.init(1)


def means_of(clients: int = CLIENTS) -> Tensor:
    return torch.randn(clients, 3, 6, generator=torch.Generator().manual_seed(2))


def prototypes(seen: Seen, means: Tensor) -> Tensor:
    return 0.7 * seen.mean((seen.features - means[seen.y]).square().mean(1))


def plain_features(p: dict[str, Tensor], x: Tensor) -> Tensor:
    first = next(n for n in p if n.endswith("weight") and not n.startswith("head")).removesuffix("weight")
    return torch.tanh(x @ p[f"{first}weight"].T + p[f"{first}bias"])


def sgd(cohort: Cohort, i: int, p: dict[str, Tensor], loss: Any, **request: Any) -> dict[str, Tensor]:
    for x, y in batches(cohort, i, **request):
        leaves = {n: t.detach().requires_grad_() for n, t in p.items()}
        grads = torch.autograd.grad(loss(leaves, x, y), list(leaves.values()), allow_unused=True)
        p = {n: t - 0.1 * (0.0 if g is None else g) for (n, t), g in zip(p.items(), grads, strict=True)}
    return {n: t.detach() for n, t in p.items()}


@engines
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_training_is_sgd_on_the_loss_with_the_term_or_on_the_term(engine, directed, replaces):
    cohort, start = setting()
    means = means_of()
    way = {"direction": lambda state, grad: grad(state)} if directed else {}

    def local(client, state, received):
        term = Term(prototypes, given=(state["means"],), replaces=replaces)
        return client.fit(received, term=term, length=Length(epochs=2), **way)

    found = run(engine, cohort, local, TensorDict({"means": means}, batch_size=[CLIENTS]), start)
    for i in range(CLIENTS):

        def loss(p, x, y, i=i):
            z = plain_features(p, x)
            pull = 0.7 * (z - means[i][y]).square().mean(1).mean()
            return pull if replaces else F.cross_entropy(z @ p["head.weight"].T + p["head.bias"], y) + pull

        expected = sgd(cohort, i, tree.tensors(start), loss, epochs=2)
        assert_states(found[i], expected, **CLOSE)
        assert max(float((t - start[n]).abs().max()) for n, t in expected.items()) > 0.01


@engines
def test_several_terms_add_up_and_take_what_they_are_given(engine):
    cohort, start = setting()
    means = means_of(1)[0]
    both = [
        Term(prototypes, given=(means,)),
        Term(
            lambda seen, t: seen.mean(seen.outputs[:, 0]) * t["a"]["b"],
            given=(TensorDict({"a": {"b": torch.tensor(0.3)}}),),
        ),
    ]
    found = fit(engine, cohort, start, term=both)
    joined = fit(
        engine,
        cohort,
        start,
        term=Term(lambda seen, m: prototypes(seen, m) + 0.3 * seen.mean(seen.outputs[:, 0]), given=(means,)),
    )
    assert_states(found, dict(joined.items()), **CLOSE)


@engines
def test_what_a_term_sees_is_the_batch_and_the_runs_loss(engine):
    """The loss itself as a term that replaces it, and half of it twice, are plain training."""
    cohort, start = setting(momentum=0.5)
    plain = fit(engine, cohort, start, epochs=2)
    again = fit(engine, cohort, start, epochs=2, term=Term(lambda seen: seen.loss, replaces=True))
    by_hand = Term(
        lambda seen: seen.mean(F.cross_entropy(seen.outputs, seen.y, reduction="none")), replaces=True
    )
    for other in (again, fit(engine, cohort, start, epochs=2, term=by_hand)):
        assert_states(other, dict(plain.items()), **CLOSE)


@engines
def test_another_model_on_the_batch_gets_no_gradient(engine):
    """MOON's ingredients: features of a fixed model, whose own parameters train elsewhere."""
    cohort, start = setting()
    fixed = cohort.model.init(5)

    def pull(seen: Seen, other: TensorDict) -> Tensor:
        outputs, features = seen.of(other)
        return seen.mean((seen.features - features).square().sum(1)) + seen.mean(
            (seen.outputs - outputs).square().sum(1)
        )

    found = fit(engine, cohort, start, term=Term(pull, given=(fixed,)))
    for i in range(CLIENTS):

        def loss(p, x, y):
            z, f = plain_features(p, x), plain_features(tree.tensors(fixed), x)
            out, other = (h @ q["head.weight"].T + q["head.bias"] for h, q in ((z, p), (f, fixed)))
            return (
                F.cross_entropy(out, y)
                + (z - f).square().sum(1).mean()
                + (out - other).square().sum(1).mean()
            )

        assert_states(found[i], sgd(cohort, i, tree.tensors(start), loss), **CLOSE)


@engines
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_tensors_that_the_model_lacks_train_along(engine, momentum):
    """A second head that only the term uses: gradients reach it, and the model none through it."""
    cohort, start = setting(momentum=momentum)
    own = {"second.weight": torch.zeros(CLIENTS, 3, 6), "second.bias": means_of()[:, :, 0].contiguous()}

    def second(seen: Seen) -> Tensor:
        out = (
            seen.outputs.detach()
            + seen.features.detach() @ seen.own["second.weight"].T
            + seen.own["second.bias"]
        )
        return seen.mean(F.cross_entropy(out, seen.y, reduction="none"))

    def local(client, state, received):
        return client.fit(tree.merge(received, state), term=Term(second))

    found = run(engine, cohort, local, TensorDict(own, batch_size=[CLIENTS]), start)
    plain = fit(engine, cohort, start)
    assert_states(found.select(*start.keys()), dict(plain.items()), **CLOSE)
    if momentum:
        return
    for i in range(CLIENTS):
        p = {**tree.tensors(start), **{n: t[i] for n, t in own.items()}}

        def loss(p, x, y):
            z = plain_features(p, x)
            out = z @ p["head.weight"].T + p["head.bias"]
            two = out.detach() + z.detach() @ p["second.weight"].T + p["second.bias"]
            return F.cross_entropy(out, y) + F.cross_entropy(two, y)

        assert_states(found[i], sgd(cohort, i, p, loss), **CLOSE)


@engines
def test_sums_over_samples_whole_and_by_class(engine):
    cohort, _ = setting()
    starts = torch.stack([cohort.model.init(i) for i in range(CLIENTS)])

    def look(client, state, received):
        scale = received["scale"]
        return TensorDict(
            {
                "z": client.summed(state, lambda seen: seen.features),
                "by": client.summed(state, lambda seen, s: s * seen.features, given=(scale,), by_class=True),
                "loss": client.summed(
                    state, lambda seen: F.cross_entropy(seen.outputs, seen.y, reduction="none")
                ),
                "counts": client.class_counts(),
            },
            batch_size=[],
        )

    received = TensorDict({"scale": torch.tensor(2.0)})
    found = run(engine, cohort, look, starts, received)
    for i, rows in enumerate(cohort.members):
        x, y = cohort.source.x[rows], cohort.source.y[rows]
        z = plain_features(tree.tensors(starts[i]), x)
        torch.testing.assert_close(found["z"][i], z.sum(0), **CLOSE)
        by = torch.stack([2 * z[y == c].sum(0) for c in range(3)])
        torch.testing.assert_close(found["by"][i], by, **CLOSE)
        assert found["counts"][i].tolist() == [int((y == c).sum()) for c in range(3)]
        out = z @ starts[i]["head.weight"].T + starts[i]["head.bias"]
        torch.testing.assert_close(found["loss"][i], F.cross_entropy(out, y, reduction="sum"), **CLOSE)


@engines
def test_privacy_clips_the_term_with_the_loss_of_every_sample(engine):
    """Without bound and noise it is plain training; one that mixes samples is refused, and so is a sum."""
    means = means_of(1)[0]
    cohort, start = setting(dp=SampleDP(1e9, 0.0, "shuffle"))
    private = fit(engine, cohort, start, term=Term(prototypes, given=(means,)))
    plain = fit(engine, setting()[0], start, term=Term(prototypes, given=(means,)))
    assert_states(private, dict(plain.items()), **CLOSE)
    tight = setting(dp=SampleDP(0.01, 0.0, "shuffle"))[0]
    moved = fit(engine, tight, start, term=Term(prototypes, given=(1e3 * means,)), steps=1)
    for i in range(CLIENTS):
        square = sum((moved[n][i] - start[n]).square().sum() for n in start.keys())  # noqa: SIM118
        assert float(square.sqrt()) <= 0.1 * 0.01 * (1 + 1e-4)
    with pytest.raises(ModelError, match="compares the samples of a batch"):
        fit(engine, cohort, start, term=Term(prototypes, given=(means,), mixes=True))
    for look in (lambda c: c.summed(start, lambda seen: seen.features), lambda c: c.class_counts()):
        with pytest.raises(TailorflError, match="sample-level privacy does not cover"):
            look(alone(cohort))


def test_what_cannot_be_is_told():
    cohort, start = setting()
    client = alone(cohort)
    with pytest.raises(TailorflError, match=r"one entry a sample, \[7, \.\.\.\], but is of shape \[\]"):
        client.summed(start, lambda seen: seen.outputs.sum())
    with pytest.raises(TailorflError, match=r"seen\.rows is of public samples"):
        client.fit(start, term=Term(lambda seen: seen.rows.sum() * 0.0))
    with pytest.raises(TailorflError, match="tensors, TensorDicts, mappings and tuples travel"):
        client.fit(start, term=Term(lambda seen, a: seen.loss, given=(0.5,)))  # type: ignore[arg-type]
    with pytest.raises(TailorflError, match="one model at a time"):
        client.fit({"a": start, "b": start}, term=Term(prototypes), direction=lambda s, g: s)


@pytest.mark.parametrize(
    "refused", [{"public": 0}, {"public": 1, "replaces": True}, {"public": 1, "keeps": ("kept",)}]
)
def test_a_term_on_public_samples_takes_one_at_least_and_is_added(refused: dict[str, Any]) -> None:
    assert Term(lambda seen: seen.loss, public=1).public == 1
    with pytest.raises(TailorflError, match="public"):
        Term(lambda seen: seen.loss, **refused)
