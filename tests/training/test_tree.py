"""TensorDict maths: structure goes through unharmed, and the vector space laws hold."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tailorfl.training import tree


def nested() -> TensorDict:
    inner = TensorDict(
        {"c.weight": torch.randn(2, 3), "deep": TensorDict({"d": torch.ones(())}, batch_size=[])}, []
    )
    return TensorDict({"a.weight": torch.randn(4), "b": inner}, batch_size=[])


def flat(seed: int, *shape: int) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    entries = {"w": torch.randn(*shape, 3, 2, generator=rng), "b": torch.randn(*shape, 5, generator=rng)}
    return TensorDict({**entries, "count": torch.full(shape, seed)}, batch_size=list(shape))


def test_nest_is_the_inverse_of_leaves_and_gives_every_level_its_batch_size():
    value = nested()
    paths = ["a.weight", "b/c.weight", "b/deep/d"]
    assert [path for path, _ in tree.leaves(value)] == paths
    again = tree.nest(tree.leaves(value))
    assert [path for path, _ in tree.leaves(again)] == paths
    assert all(x is y for (_, x), (_, y) in zip(tree.leaves(value), tree.leaves(again), strict=True))
    stacked = tree.nest([("a", torch.zeros(3, 2)), ("b/c", torch.zeros(3))], [3])
    assert stacked.batch_size == stacked["b"].batch_size == torch.Size([3])


def test_fill_keeps_the_structure_of_the_template_even_where_it_is_empty():
    template = TensorDict({"w": torch.zeros(2), "optimizer": TensorDict({}, batch_size=[])}, batch_size=[])
    filled = tree.fill(template, {"w": torch.ones(2)})
    assert set(filled.keys()) == {"w", "optimizer"}
    assert torch.equal(filled["w"], torch.ones(2))
    with pytest.raises(KeyError):
        tree.fill(template, {})
    flat = {"w": torch.ones(2), "optimizer/m": torch.ones(3), "means/of/c": torch.zeros(4)}
    assert dict(tree.leaves(tree.fill(template, flat))) == flat


def test_merge_prefers_the_last_part_and_copies_nothing():
    a, b = TensorDict({"x": torch.zeros(1), "y": torch.zeros(1)}, []), TensorDict({"y": torch.ones(1)}, [])
    merged = tree.merge(a, b)
    assert merged["y"] is b["y"]
    assert merged["x"] is a["x"]
    assert float(a["y"]) == 0.0
    assert len(tree.merge().keys()) == 0


def test_dot_is_an_inner_product_and_ignores_counters():
    a, b, c = flat(1), flat(2), flat(3)
    by_hand = sum(float((a[n].double() * b[n].double()).sum()) for n in ("w", "b"))
    assert float(tree.dot(a, b)) == pytest.approx(by_hand, rel=1e-5)
    assert float(tree.dot(a, b)) == pytest.approx(float(tree.dot(b, a)))
    a, b = a.select("w", "b"), b.select("w", "b")
    left = float(tree.dot(a + b * 2.0, c))
    assert left == pytest.approx(float(tree.dot(a, c)) + 2 * float(tree.dot(b, c)), rel=1e-4)
    assert float(tree.norm(a)) == pytest.approx(float(torch.cat([a["w"].flatten(), a["b"]]).norm()), rel=1e-6)
    assert float(tree.dot(tree.empty(), tree.empty())) == 0.0


def test_the_weighted_mean_is_the_sum_of_weighted_clients_with_the_first_clients_counters():
    stack, weights = flat(7, 3), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    stack["count"] = torch.tensor([9, 5, 7])
    stack["part"] = TensorDict({"x": torch.tensor([1.0, 3.0, 2.0])}, batch_size=[3])
    mean = tree.weighted_mean(stack, weights)
    for name in ("w", "b"):
        torch.testing.assert_close(mean[name], sum(float(a) * stack[name][i] for i, a in enumerate(weights)))
        assert mean[name].dtype == torch.float32
    assert float(mean["part"]["x"]) == pytest.approx(1.8)
    assert mean["count"].dtype == torch.int64
    assert int(mean["count"]) == 9
