"""What messages weigh against what the records count: bytes of tensors, and little else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.federation import Federation, experiment, store_of
from tailorfl.deploy.codec import Packet

BESIDE = 2_000
"""Bytes of facts in a message, at most."""


def tensor_bytes(packet: Packet) -> int:
    """What the tensors of a packet weigh."""
    return sum(t.numel() * t.element_size() for t in packet.tensors.values())


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "scaffold"])
def test_bytes_of_messages_are_those_of_the_records(method: str, tmp_path: Path) -> None:
    config = experiment(
        method,
        data={"name": "digits", "clients": 2, "samples": 100},
        model={"name": "mlp", "hidden": [512, 400]},  # 242,490 parameters
        eval={"every": 0},
    )
    federation = Federation(tmp_path, 2)
    try:
        result = federation.host(config)
    finally:
        federation.close()
    rounds = [(Packet.decoded(q), q, Packet.decoded(a), a) for _, q, a in federation.of_kind("train")]
    assert len(rounds) == 4
    last: Any = store_of(result).rounds().iloc[-1]
    assert last["bytes_down"] == sum(tensor_bytes(asked) for asked, *_ in rounds)
    assert last["bytes_up"] == sum(tensor_bytes(answer) for _, _, answer, _ in rounds)
    for asked, question, answer, reply in rounds:
        assert 0 < len(question) - tensor_bytes(asked) < BESIDE
        assert 0 < len(reply) - tensor_bytes(answer) < BESIDE
    assert sum(len(q) for _, q, _, _ in rounds) == pytest.approx(last["bytes_down"], rel=0.05)
    assert sum(len(a) for *_, a in rounds) == pytest.approx(last["bytes_up"], rel=0.05)
