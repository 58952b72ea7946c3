"""`build`: one entrance from settings to a federation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tailorfl import modules
from tailorfl.data import build as build_module
from tailorfl.data.build import build
from tailorfl.data.dealing import Dealt, split_in_turn
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.data.validate import weaknesses
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition import available
from tailorfl.partition.rows import Rows
from tailorfl.partition.splits import read_split

WRITERS = tuple(f"writer{i}" for i in range(8))
DOMAINS = ("art", "photo", "sketch", "word")


def source(samples: int = 1024, official: bool = False) -> Source:
    """Four classes in 8 writers and 4 domains, evenly; x holds the row number; a quarter is the test part."""
    rows = torch.arange(samples)
    return Source(
        "toy",
        torch.stack([rows.float(), (rows % 7).float()], dim=1),
        rows % 4,
        "classification",
        4,
        test=rows // 128 % 4 == 3 if official else None,
        groups={"client": (rows // 4) % 8, "domain": (rows // 32) % 4},
        group_names={"client": WRITERS, "domain": DOMAINS},
    )


TESTED = {row for row in range(1024) if row // 128 % 4 == 3}


def all_rows(federation: Federation, part: str = "train") -> set[int]:
    return set(np.concatenate(getattr(federation, part)).tolist())


def same(one: Federation, two: Federation) -> bool:
    lists = [(getattr(one, part), getattr(two, part)) for part in ("train", "val", "test")]
    return one.names == two.names and all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in lists
    )


class TestDefaults:
    def test_digits_need_no_settings(self) -> None:
        federation = build()
        assert federation.num_clients == len(federation) == 20
        assert sum(federation.sizes(part).sum() for part in ("train", "val", "test")) == 1797
        assert weaknesses(federation) == []

    @pytest.mark.parametrize(
        ("groups", "names"), [(("client", "domain"), WRITERS), (("domain",), DOMAINS), ((), None)]
    )
    def test_partition_follows_the_sources_own_lines(
        self, groups: tuple[str, ...], names: tuple[str, ...] | None
    ) -> None:
        full = source()
        groups_of, names_of = ({kind: of[kind] for kind in groups} for of in (full.groups, full.group_names))
        federation = build(source=replace(full, groups=groups_of, group_names=names_of))
        assert federation.names == (names or tuple(f"client-{i:02d}" for i in range(20)))


@pytest.mark.parametrize("name", sorted(set(available()) - {"fedclup_classes", "flwr"}))
@pytest.mark.parametrize("official", [False, True])
class TestEveryPartition:
    def build(self, name: str, official: bool, seed: int = 0) -> Federation:
        clients = None if name in ("natural", "domain") else 6
        return build(source=source(official=official), partition=name, clients=clients, seed=seed)

    def test_parts_are_disjoint_and_complete(self, name: str, official: bool) -> None:
        federation = self.build(name, official)
        parts = [all_rows(federation, part) for part in ("train", "val", "test")] + [
            set(federation.server.tolist())
        ]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 1024
        if official:
            assert parts[2] == TESTED

    def test_deterministic_in_the_seed(self, name: str, official: bool) -> None:
        assert same(self.build(name, official), self.build(name, official))
        assert not same(self.build(name, official), self.build(name, official, seed=1))


def test_streams_are_separate() -> None:
    """A different split or public set leaves the clients' samples where they were."""
    one = build(source=source(), partition="dirichlet", clients=5)
    two = build(
        source=source(), partition="dirichlet", clients=5, split={"train": 0.5, "val": 0.25, "test": 0.25}
    )
    for client in range(5):
        first, second = (
            np.sort(np.concatenate([found.train[client], found.val[client], found.test[client]]))
            for found in (one, two)
        )
        assert np.array_equal(first, second)


class TestSplit:
    def test_global_test_is_the_official_part_for_everybody(self) -> None:
        federation = build(source=source(official=True), split={"test": "global"}, heldout_clients=2)
        for rows in federation.test:
            assert rows.tolist() == sorted(TESTED)

    def test_shares_leave_the_official_part_unused(self) -> None:
        federation = build(source=source(official=True), split={"train": 0.5, "test": 0.5})
        assert all_rows(federation) | all_rows(federation, "test") == set(range(1024)) - TESTED

    def test_perfed_ckt(self) -> None:
        """PerFed-CKT: train 0.1, 0.3 or 0.4 of a client's samples, val 0.1, test 0.5, nothing empty."""
        federation = build(
            source=source(),
            partition="dirichlet",
            partition_options={"alpha": 0.01, "min_size": 10},
            clients=40,
            split="perfed_ckt",
        )
        for part in ("train", "val", "test"):
            assert federation.sizes(part).min() >= 1
        assert federation.sizes("train").sum() < 0.45 * 1024


class TestSamples:
    def test_cap_is_even_over_parts_clients_and_classes(self) -> None:
        federation = build(source=source(official=True), samples=160)
        assert sum(federation.sizes(part).sum() for part in ("train", "val", "test")) == 160
        assert federation.sizes("test").tolist() == [5] * 8
        assert (federation.sizes("train") + federation.sizes("val")).tolist() == [15] * 8
        classes = federation.describe("train").sum(axis=0) + federation.describe("val").sum(axis=0)
        assert abs(classes - 30).max() <= 8

    def test_cap_above_the_size_changes_nothing(self) -> None:
        assert same(build(source=source()), build(source=source(), samples=10_000))


class TestHeldoutClients:
    @pytest.mark.parametrize("name", sorted(set(available()) - {"fedclup_classes", "domain", "flwr"}))
    def test_held_out_clients_share_no_training_row(self, name: str) -> None:
        federation = build(source=source(), partition=name, clients=5, heldout_clients=2)
        assert (federation.num_clients, len(federation)) == (5, 7)
        training = set(np.concatenate(federation.train[:5]).tolist())
        for part in ("train", "val", "test"):
            assert not training & set(np.concatenate(getattr(federation, part)[5:]).tolist())
        held_out = set(np.concatenate(federation.test[5:]).tolist())
        assert not held_out & set(federation.global_test().tolist())

    def test_by_name(self) -> None:
        federation = build(source=source(), heldout_clients=["writer6", "writer1"])
        assert federation.names[-2:] == ("writer6", "writer1")
        assert federation.num_clients == 6
        assert {row // 4 % 8 for row in federation.train[6]} == {6}

    def test_named_clients_are_never_lost_in_the_draw(self) -> None:
        for seed in range(10):
            federation = build(source=source(), clients=3, heldout_clients="writer2", seed=seed)
            assert (federation.num_clients, federation.names[3:]) == (3, ("writer2",))
            assert "writer2" not in federation.names[:3]

    def test_natural_clients_are_drawn_and_not_just_the_last(self) -> None:
        last = {build(source=source(), heldout_clients=1, seed=seed).names[-1] for seed in range(40)}
        assert len(last) > 4


class TestHeldoutDomain:
    def test_becomes_a_client_and_a_shifted_set(self) -> None:
        federation = build(source=source(official=True), partition="domain", heldout_domain="photo")
        assert federation.names == ("art", "sketch", "word", "photo")
        assert federation.num_clients == 3
        rows = {row for row in range(1024) if row // 32 % 4 == 1}
        assert all_rows(federation) & rows == set(federation.train[3].tolist())
        assert rows & TESTED == set(federation.test[3].tolist())
        shifted = federation.shifted["photo"]
        assert set(shifted.x[:, 0].int().tolist()) == rows & TESTED
        assert shifted.test is None

    def test_without_an_official_split_all_of_it_is_shifted(self) -> None:
        shifted = build(source=source(), partition="domain", heldout_domain="photo").shifted["photo"]
        assert set(shifted.x[:, 0].int().tolist()) == {row for row in range(1024) if row // 32 % 4 == 1}

    def test_several_and_with_another_partition(self) -> None:
        federation = build(
            source=source(),
            partition="dirichlet",
            clients=4,
            heldout_domain=["art", "word"],
            heldout_clients=1,
        )
        assert federation.num_clients == 4
        assert federation.names[-2:] == ("art", "word")
        used = np.concatenate(federation.train[:5])
        assert set((used // 32 % 4).tolist()) == {1, 2}
        assert list(federation.shifted) == ["art", "word"]


class TestPublic:
    def test_part_of_the_same_source_is_taken_from_all_clients(self) -> None:
        federation = build(source=source(official=True), public="toy", public_samples=50, heldout_clients=1)
        assert federation.public is not None
        rows = set(federation.public.x[:, 0].int().tolist())
        assert len(rows) == 50
        for part in ("train", "val", "test"):
            assert not rows & all_rows(federation, part)
        assert not rows & TESTED

    def test_public_samples_of_the_clients_own_source_are_set_aside_however_it_is_named(self) -> None:
        own = source()
        by_name = build(source=own, public="toy", public_samples=50)
        assert by_name.public is not None
        modules.load([__name__])
        named: dict[str, Any] = {"name": f"{__name__}:source", "public": f"{__name__}:source"}
        for given in ({"source": own, "public": own}, named):
            federation = build(**given, public_samples=50)
            assert federation.public is not None
            assert torch.equal(federation.public.x, by_name.public.x)
            parts = [federation.sizes(part).sum() for part in ("train", "val", "test")]
            assert sum(parts) == len(own) - 50

    def test_labels_are_blanked(self) -> None:
        federation = build(source=source(), public="toy")
        assert federation.public is not None
        assert len(federation.public) == 102
        assert not federation.public.y.any()

    def test_another_source_is_drawn_by_the_seed(self) -> None:
        def drawn(seed: int) -> list[int]:
            other = Source(
                "other", torch.arange(400.0).view(200, 2), torch.arange(200), "classification", 200
            )
            public = build(source=source(), public=other, public_samples=30, seed=seed).public
            assert public is not None
            return [int(value) for value in public.x[:, 0]]

        assert len(set(drawn(0))) == 30
        assert drawn(0) == drawn(0) != drawn(1)


class TestNormalise:
    def test_clients_have_standard_training_features(self) -> None:
        federation = build(source=source(), normalise="client", heldout_domain="art", public="toy")
        for rows in federation.train:
            x = federation.source.x[torch.from_numpy(rows)]
            torch.testing.assert_close(x.mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)
            torch.testing.assert_close(x.std(dim=0), torch.ones(2), atol=1e-5, rtol=0)
        # The shifted domain is scaled by its own client, the public set by all training clients.
        assert abs(float(federation.shifted["art"].x.mean())) < 0.2
        assert federation.public is not None
        assert abs(float(federation.public.x.mean())) < 0.3


class TestGroups:
    def test_natural_along_another_kind(self) -> None:
        federation = build(source=source(), partition="natural", partition_options={"group": "domain"})
        assert federation.names == DOMAINS

    def test_domain_shared_by_several_clients(self) -> None:
        federation = build(source=source(), partition="domain", clients=8)
        assert federation.names[:4] == ("art-0", "art-1", "photo-0", "photo-1")


def others(width: int) -> Source:
    return Source("other", torch.zeros(5, width), torch.zeros(5, dtype=torch.int64), "classification", 2)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"samples": 0}, ConfigError, "samples = 0"),
        ({"heldout_clients": ["writer9"]}, ConfigError, "'writer9'"),
        ({"heldout_clients": 8}, ConfigError, "leaves 0 to train"),
        ({"heldout_clients": -1}, ConfigError, "heldout_clients = -1"),
        ({"heldout_clients": pd.Series(["Miller"])}, ConfigError, "^((?!Miller).)*$"),
        ({"heldout_domain": "photos"}, ConfigError, "Did you mean 'photo'"),
        ({"source": None, "heldout_domain": "photo"}, DataError, "'digits'"),
        ({"public": others(3)}, DataError, r"\[3\].*\[2\]"),
        ({"public": others(2), "public_samples": 6}, DataError, "5 samples.*=6"),
        ({"public": "toy", "public_samples": 1024}, DataError, "public set of 1024"),
        ({"public": "toy", "public_samples": 0}, ConfigError, "public_samples = 0"),
        ({"public": "tinyimagenett"}, ConfigError, "'tinyimagenet'"),
        ({"normalise": "clients"}, ConfigError, "Did you mean 'client'"),
        ({"normalise": "client", "corruptions": {}}, ConfigError, "choose one"),
        (
            {"partition": "natural", "partition_options": {"group": "hospital"}},
            DataError,
            "'client', 'domain'",
        ),
        ({"source": None, "partition": "domain"}, DataError, "'digits' has none"),
        *(({"seed": seed}, ConfigError, "seed") for seed in (-1, 1.5, True)),
        *(({"split": split}, ConfigError, "split") for split in ("perfed", {"trian": 0.5}, {"train": 1.5})),
        ({"corruptions": {"kind": "fog"}}, ConfigError, "Did you mean 'corruptions.kinds'"),
        ({"corruptions": {"severities": [0]}}, ConfigError, "severities.0 = 0"),
        ({"corruptions": {"severities": []}}, ConfigError, "not be empty"),
        (
            {"partition": "dirichlet", "partition_options": {"alpha": 0.001, "min_size": 0}, "clients": 60},
            DataError,
            "no training samples",
        ),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(**{"source": source(), **settings})


def test_corruptions_become_shifted_sets() -> None:
    pytest.importorskip("imagecorruptions")
    options = {"kinds": ["fog", "contrast"], "severities": [1, 3], "samples": 10}
    federation = build(corruptions=options, clients=5, heldout_clients=1)
    assert list(federation.shifted) == ["fog-1", "fog-3", "contrast-1", "contrast-3"]
    tested = federation.source.y[torch.from_numpy(federation.global_test())]
    assert set(federation.shifted["fog-1"].y.tolist()) <= set(tested.tolist())


def test_corrupted_sets_are_of_the_test_images_of_training_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With corruptions that change nothing, which rows they are of can be read off; the seed is passed on."""
    numbered = Source("numbered", torch.zeros(400, 1, 8, 8), torch.arange(400) % 4, "classification", 4)
    seeds: list[int] = []

    def corrupted(source: Source, rows: Any, options: Any, seed: int) -> dict[str, Source]:
        seeds.append(seed)
        rows = torch.from_numpy(rows)
        return {"fog-1": Source("fog", source.x[rows], rows, "classification", 400)}

    monkeypatch.setattr(build_module, "corrupted_sets", corrupted)
    found = build(source=numbered, partition="iid", corruptions={}, clients=5, heldout_clients=1, seed=3)
    tested = set(np.concatenate([found.test[i] for i in range(5)]).tolist())
    assert set(found.shifted["fog-1"].y.tolist()) == tested
    for part in ("train", "val"):
        assert not tested & set(np.concatenate(getattr(found, part)).tolist())
    assert seeds == [3]


def test_samples_limit_what_is_decoded(need_data: Callable[[str], Path]) -> None:
    need_data("cifar10_jpeg.npz")
    federation = build("cifar10", samples=600, clients=4)
    assert len(federation.source) == 600


def test_ten_thousand_clients_are_built_in_seconds() -> None:
    generator = torch.Generator().manual_seed(0)
    big = Source(
        "big",
        torch.zeros(200_000, 4),
        torch.randint(0, 10, (200_000,), generator=generator),
        "classification",
        10,
    )
    started = time.process_time()
    federation = build(source=big, partition="dirichlet", clients=10_000)
    assert time.process_time() - started < 6.0  # about 0.7 s on an idle core
    assert federation.sizes().min() >= 7


def test_public_constants_stay_where_clients_join_in_turn() -> None:
    images = torch.arange(8 * 3 * 4 * 4).reshape(8, 3, 4, 4).to(torch.uint8)
    toy = Source(
        "toy", images, torch.arange(8) % 2, "classification", 2, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0)
    )
    rows = Rows.of([np.arange(0, 4), np.arange(4, 8)])
    dealt = Dealt(rows, None, ("a", "b"), 2, np.empty(0, dtype=np.int64))
    federation = split_in_turn(toy, dealt, (("a",), ("b",)), read_split(None, False), 0)
    assert (federation.source.mean, federation.source.std) == (toy.mean, toy.std)
