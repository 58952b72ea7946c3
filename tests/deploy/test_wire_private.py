"""What passes the post: nothing private, looked for as bytes; and as many bytes as the records count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from deploy.federation import (
    PRIVATE,
    Ask,
    Federation,
    deployed,
    experiment,
    job_of,
    newest,
    place_of,
    small,
)
from methods.settings import one_of
from tailorfl.core import method as registry
from tailorfl.core.client import Client
from tailorfl.deploy.messages import Packet
from tailorfl.methods.ditto import Ditto
from tailorfl.runs.build import make_federation
from tailorfl.settings.experiment import ExperimentConfig

WINDOW = 16
DATA = {"name": "digits", "clients": 3, "samples": 300, "public": "digits", "public_samples": 30}
METHODS: list[Any] = ["ditto", "fedrep", {"name": "perada", "distil": {"steps": 2}}, "apfl"]


class Telling(Ditto):
    """Ditto that replies with its personal model."""

    name: ClassVar[str] = "telling"

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        new, _ = super().local(client, state, received)
        return new, new


def windows(data: bytes, step: int = 1) -> set[bytes]:
    """All that stands in 16 bytes on end, but for what has fewer than four different bytes."""
    found = (data[k : k + WINDOW] for k in range(0, len(data) - WINDOW + 1, step))
    return {one for one in found if len(set(one)) >= 4}


def raw(tensors: Iterable[Tensor], step: int = 4) -> set[bytes]:
    """The windows of tensors' own bytes."""
    return set[bytes]().union(*(windows(t.contiguous().numpy().tobytes(), step) for t in tensors))


class Listening(Federation):
    """Keeps all that goes either way, and every private state that a client has on its disk after an answer."""

    def __init__(self, config: ExperimentConfig, folder: Path) -> None:
        super().__init__(folder, meddle=self._kept)
        self.config = config
        self.states: list[Tensor] = []

    def _kept(self, node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if question.kind == "train":
            state = newest(place_of(self.config, self.folder, node - 100))
            # APFL keeps, beside its v, the w that it sends.
            self.states += [tensor for name, tensor in state.items() if not name.startswith("w/")]
        return answer


def heard(method: Any, folder: Path) -> tuple[Listening, set[bytes], set[bytes], set[bytes]]:
    """Run a method; return the post, and the windows of what went up, went down, and lies at the server."""
    config = experiment(method, data=DATA, eval={"every": 1})
    with Listening(config, folder) as post:
        post.host(config)
    up = set[bytes]().union(*(windows(answer) for _, _, answer in post.passed))
    down = set[bytes]().union(*(windows(question) for _, question, _ in post.passed))
    files = [path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()]
    assert files
    return post, up, down, set[bytes]().union(*map(windows, files))


def private_samples(config: ExperimentConfig) -> tuple[set[bytes], set[bytes]]:
    """The windows of all clients' training samples, as floats and as whole numbers; and their labels' vectors."""
    federation = make_federation(config, config.data.seed_of(job_of(config).seed))
    samples, labels = set[bytes](), set[bytes]()
    for rows in federation.train:
        x, y = federation.source.x[rows], federation.source.y[rows]
        as_bytes = x if x.dtype == torch.uint8 else (x * 255).round().to(torch.uint8)
        sixteenths = (x.float() * 16).round().to(torch.uint8)
        samples |= raw([x.float()]) | raw([as_bytes, sixteenths], step=1)
        for kind in (torch.uint8, torch.int32, torch.int64, torch.float32):
            labels.add(y[:WINDOW].to(kind).numpy().tobytes())
        labels.add(", ".join(map(str, y[:WINDOW].tolist())).encode())
    return samples, labels


@pytest.mark.threat(
    "a server", "reads all that a client sends", now="no sample, label or private state is in it"
)
@pytest.mark.parametrize("method", one_of(2, METHODS))
def test_nothing_private_leaves(method: Any, tmp_path: Path) -> None:
    post, up, down, at_server = heard(method, tmp_path)
    samples, labels = private_samples(post.config)
    assert len(samples) > 1000
    assert not samples & (up | at_server)
    everything = b"".join(answer for _, _, answer in post.passed)
    everything += b"".join(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert not [one for one in labels if one in everything]
    # Where nothing is learnt, as at pixels that are always 0, it is what was sent.
    states = raw(post.states) - down
    assert len(states) > 100
    assert not states & (up | at_server)


def test_a_method_that_tells_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setitem(registry._REGISTRY, "telling", Telling)
    post, up, down, _ = heard("telling", tmp_path)
    assert len((raw(post.states) - down) & up) > 100


def test_the_card_of_a_private_model_says_that_it_is_private(tmp_path: Path) -> None:
    """Its ε is at the server."""
    config = small("local", train=PRIVATE, rounds=1)
    deployed(config, tmp_path, 3)
    card = (place_of(config, tmp_path, 1) / "model" / "README.md").read_text(encoding="utf-8")
    assert "differential privacy of one sample" in card
    assert "without differential privacy" not in card


def test_samples_among_other_bytes_are_heard(tmp_path: Path) -> None:
    """The test above can fail: of one sample in a reply, at any place, something is found."""
    config = experiment("ditto", data=DATA)
    federation = make_federation(config, 5)
    samples, _ = private_samples(config)
    row = federation.source.x[federation.train[2][3]].float()
    tensors = {"reply/a": torch.ones(3, dtype=torch.uint8), "reply/b": row}
    assert samples & windows(Packet("train", {"round": 1}, tensors).encoded())


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
        model={"name": "mlp", "hidden": [64, 50]},  # 7,920 parameters
        eval={"every": 0},
    )
    with Federation(tmp_path, 2) as federation:
        result = federation.host(config)
    rounds = [(Packet.decoded(q), q, Packet.decoded(a), a) for _, q, a in federation.of_kind("train")]
    assert len(rounds) == 4
    last: Any = result.store.rounds().iloc[-1]
    assert last["bytes_down"] == sum(tensor_bytes(asked) for asked, *_ in rounds)
    assert last["bytes_up"] == sum(tensor_bytes(answer) for _, _, answer, _ in rounds)
    for asked, question, answer, reply in rounds:
        assert 0 < len(question) - tensor_bytes(asked) < BESIDE
        assert 0 < len(reply) - tensor_bytes(answer) < BESIDE
