"""Packets as bytes: what is in memory once travels once, and no few bytes become many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deploy.federation import packed
from tailorfl.deploy.messages import Packet
from tailorfl.errors import MessageError


def test_a_tensor_under_two_names_travels_once() -> None:
    w = torch.randn(1000, dtype=torch.float64)
    once = len(Packet("train", {}, {"received/w": w}).encoded())
    both = Packet("train", {}, {"received/w": w, "global/w": w, "other/w": w[:999]})
    data = both.encoded()
    assert once + 999 * 8 < len(data) < once + 1000 * 8 + 500
    found = Packet.decoded(data)
    assert list(found.tensors) == ["received/w", "global/w", "other/w"]
    assert torch.equal(found.tensors["received/w"], w)
    assert torch.equal(found.tensors["global/w"], w)
    assert torch.equal(found.tensors["other/w"], w[:999])
    found.tensors["global/w"].zero_()
    assert torch.equal(found.tensors["received/w"], w), "names share memory"


def test_views_of_one_memory_that_differ_are_told_apart() -> None:
    w = torch.arange(9.0).reshape(3, 3)
    views = {"a": w, "b": w.T, "c": w.flatten(), "d": w[:, :2], "e": torch.empty(0), "f": torch.empty(0, 2)}
    views |= {"g": torch.empty(0), "h": w.view(torch.int32), "i": w[0], "j": w[:, 0]}
    found = Packet.decoded(Packet("train", {}, views).encoded()).tensors
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in views.items())


def test_equal_tensors_of_different_memory_stay_apart() -> None:
    w = torch.ones(100)
    w2 = w.clone()
    w2[5] = 3.0
    found = Packet.decoded(Packet("train", {}, {"a": w, "b": w2}).encoded()).tensors
    assert torch.equal(found["a"], w)
    assert torch.equal(found["b"], w2)


USABLE: list[tuple[object, Any]] = [(3, int), (True, bool), (0.5, (int, float)), ("a", str), ([1], list)]
UNUSABLE: list[tuple[object, Any]] = [(True, int), (3, bool), ("3", int), (None, str)]


@pytest.mark.parametrize(("value", "kind"), USABLE + UNUSABLE)
def test_a_fact_is_of_the_kind_that_is_asked_for(value: object, kind: Any) -> None:
    packet = Packet.decoded(Packet("train", {"fact": value}, {}).encoded())
    if (value, kind) in USABLE:
        assert packet.fact("fact", kind) == value
    else:
        with pytest.raises(MessageError, match="'fact'"):
            packet.fact("fact", kind)
    with pytest.raises(MessageError, match="'other'"):
        packet.fact("other", kind)


def test_names_are_no_bomb() -> None:
    packet = Packet("train", {}, {"w": torch.zeros(10_000)})
    many = {f"w{i}": "w" for i in range(1000)}
    data = packed(packet, same=many, order=["w", *many])
    with pytest.raises(MessageError, match=r"has 40,[0-9,]* bytes of tensors; at most 1,000,000"):
        Packet.decoded(data, largest=1_000_000)


@pytest.mark.parametrize("same", [{"v": "x"}, ["w"], 3, {"v": ["w"]}])
def test_bad_names_are_refused(same: object) -> None:
    with pytest.raises(MessageError, match="cannot be read"):
        Packet.decoded(packed(Packet("train", {}, {"w": torch.zeros(3)}), same=same))
