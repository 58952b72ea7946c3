"""`build`: one entrance from settings to a federation."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tailorfl import modules
from tailorfl.data import build as build_module
from tailorfl.data.build import build
from tailorfl.data.dealing import Dealt, split_in_turn
from tailorfl.data.federation import Federation, weaknesses
from tailorfl.data.own import from_tensors
from tailorfl.data.preparation import given_digest
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition import RECIPES
from tailorfl.partition.rows import Rows
from tailorfl.partition.splits import read_split

PARTS = ("train", "val", "test")
WRITERS = tuple(f"writer{i}" for i in range(8))
ENDS = ("-0", "-1")
DOMAINS = ("art", "photo", "sketch", "word")
TESTED = {row for row in range(1024) if row // 128 % 4 == 3}
PARTITIONS = sorted(set(RECIPES) - {"fedclup_classes", "flwr"})


def source(official: bool = False) -> Source:
    """Four classes in 8 writers and 4 domains, evenly; x holds the row number; a quarter is the test part."""
    rows = torch.arange(1024)
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


def toy(official: bool = False, **settings: Any) -> Federation:
    return build(source=source(official), **settings)


def other(x: torch.Tensor, y: torch.Tensor | None = None, outputs: int = 2, **more: Any) -> Source:
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Source("other", x, y, "classification", outputs, **more)


def rows_of(federation: Federation, *parts: str) -> list[int]:
    """All rows of parts of all clients, as often as they are there."""
    return np.concatenate([federation.part(part).flat() for part in parts]).tolist()


def samples_of(source: Source) -> set[int]:
    return set(source.x[:, 0].int().tolist())


def dealt(federation: Federation) -> list[Any]:
    """What was dealt, to compare two federations."""
    return [federation.names, *([rows.tolist() for rows in federation.part(part)] for part in PARTS)]


def domain_rows(number: int) -> set[int]:
    return {row for row in range(1024) if row // 32 % 4 == number}


def test_digits_need_no_settings() -> None:
    federation = build()
    assert federation.num_clients == len(federation) == 20
    assert len(rows_of(federation, *PARTS)) == 1797
    assert weaknesses(federation) == []


@pytest.mark.parametrize(
    ("groups", "settings", "names"),
    [
        (("client", "domain"), {}, WRITERS),
        (("domain",), {}, DOMAINS),
        ((), {}, tuple(f"client-{i:02d}" for i in range(20))),
        (("client", "domain"), {"partition": "natural", "partition_options": {"group": "domain"}}, DOMAINS),
        (("domain",), {"partition": "domain", "clients": 8}, tuple(d + k for d in DOMAINS for k in ENDS)),
    ],
)
def test_clients_follow_the_groups_of_the_source(
    groups: tuple[str, ...], settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    full = source()
    groups_of, names_of = ({kind: of[kind] for kind in groups} for of in (full.groups, full.group_names))
    assert build(source=replace(full, groups=groups_of, group_names=names_of), **settings).names == names


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("official", [False, True])
def test_parts_are_disjoint_complete_and_those_of_the_seed(name: str, official: bool) -> None:
    clients = None if name in ("natural", "domain") else 6
    one, again, two = (toy(official, partition=name, clients=clients, seed=seed) for seed in (0, 0, 1))
    assert sorted([*rows_of(one, *PARTS), *one.server.tolist()]) == list(range(1024))
    assert not official or set(rows_of(one, "test")) == TESTED
    assert dealt(one) == dealt(again) != dealt(two)


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"domain"}))
def test_held_out_clients_share_no_training_row(name: str) -> None:
    federation = toy(partition=name, clients=5, heldout_clients=2)
    assert (federation.num_clients, len(federation)) == (5, 7)
    training = set(np.concatenate(federation.train[:5]).tolist())
    for part in PARTS:
        assert not training & set(np.concatenate(federation.part(part)[5:]).tolist())
    held_out = set(np.concatenate(federation.test[5:]).tolist())
    assert not held_out & set(federation.global_test().tolist())


def test_targets_are_dealt_by_bins_of_equal_size() -> None:
    targets = Source("targets", torch.zeros(40, 1), torch.arange(40.0)[:, None], "regression", 1)

    def built(bins: Any) -> Federation:
        options = {"classes": 1, "bins": bins}
        return build(source=targets, partition="labels_per_client", partition_options=options, clients=2)

    halves = [sorted(np.concatenate([built(2).part(part)[k] for part in PARTS])) for k in (0, 1)]
    assert sorted(halves) == [list(range(20)), list(range(20, 40))]
    for bins in (1, 2.5, True):
        with pytest.raises(ConfigError, match="'bins' must be a whole number of at least 2"):
            built(bins)


def test_a_different_split_leaves_the_clients_samples_where_they_were() -> None:
    one, two = (
        toy(partition="dirichlet", clients=5, split=split)
        for split in (None, {"train": 0.5, "val": 0.25, "test": 0.25})
    )
    for client in range(5):
        first, second = (sorted(np.concatenate([f.part(p)[client] for p in PARTS])) for f in (one, two))
        assert first == second


def test_global_test_is_the_official_part_for_everybody_and_shares_leave_it_unused() -> None:
    for rows in toy(True, split={"test": "global"}, heldout_clients=2).test:
        assert rows.tolist() == sorted(TESTED)
    shares = toy(True, split={"train": 0.5, "test": 0.5})
    assert set(rows_of(shares, "train", "test")) == set(range(1024)) - TESTED


def test_every_client_is_tested_on_all_official_samples_of_its_classes() -> None:
    options = {"partition": "labels_per_client", "partition_options": {"classes": 2}}
    built = toy(True, clients=5, split={"train": 1.0, "test": "classes"}, **options)
    for train, tested in zip(built.train, built.test, strict=True):
        classes = set((train % 4).tolist())
        assert len(classes) == 2
        assert set(tested.tolist()) == {row for row in TESTED if row % 4 in classes}


def test_perfed_ckt() -> None:
    """PerFed-CKT: train 0.1, 0.3 or 0.4 of a client's samples, val 0.1, test 0.5, nothing empty."""
    options = {"alpha": 0.01, "min_size": 10}
    federation = toy(partition="dirichlet", partition_options=options, clients=40, split="perfed_ckt")
    assert all(federation.sizes(part).min() >= 1 for part in PARTS)
    assert federation.sizes("train").sum() < 0.45 * 1024


def test_a_cap_of_samples_is_even_over_parts_clients_and_classes() -> None:
    federation = toy(True, samples=160)
    assert federation.sizes("test").tolist() == [5] * 8
    assert (federation.sizes("train") + federation.sizes("val")).tolist() == [15] * 8
    classes = federation.describe("train") + federation.describe("val")
    assert set(classes.ravel().tolist()) == {3, 4}  # 24 · 160 / 1024
    assert dealt(toy()) == dealt(toy(samples=10_000))


def test_clients_are_held_out_by_name_or_drawn() -> None:
    federation = toy(heldout_clients=["writer6", "writer1"])
    assert (federation.names[-2:], federation.num_clients) == (("writer6", "writer1"), 6)
    assert {row // 4 % 8 for row in federation.train[6]} == {6}
    for seed in range(10):  # one that is named is never lost in the draw of the others
        few = toy(clients=3, heldout_clients="writer2", seed=seed)
        assert (few.num_clients, few.names.index("writer2")) == (3, 3)
    assert toy(heldout_clients=WRITERS[1:]).num_clients == 1
    assert len({toy(heldout_clients=1, seed=seed).names[-1] for seed in range(40)}) > 4


def test_images_of_heldout_clients_do_not_scale_channels() -> None:
    x = torch.arange(12, dtype=torch.uint8).reshape(12, 1, 1, 1) ** 2
    images = from_tensors(x, torch.arange(12) % 2, clients=["a", "b", "c"] * 4)
    others = (x[torch.arange(12) % 3 != 1].double() / 255).numpy()
    trained = build(source=images, heldout_clients=["b"]).source
    assert (*trained.mean, *trained.std) == pytest.approx((others.mean(), others.std()))
    assert build(source=images).source.mean == images.mean
    assert given_digest(trained) == given_digest(images)  # the same for every seed


def test_a_held_out_domain_becomes_a_client_and_a_shifted_set() -> None:
    federation, photo = toy(True, partition="domain", heldout_domain="photo"), domain_rows(1)
    assert (federation.names, federation.num_clients) == (("art", "sketch", "word", "photo"), 3)
    assert set(rows_of(federation, "train")) & photo == set(federation.train[3].tolist())
    assert photo & TESTED == set(federation.test[3].tolist()) == samples_of(federation.shifted["photo"])
    assert federation.shifted["photo"].test is None
    # a group of another kind may have the same name
    data = source(True)
    groups = {"camera": data.groups["client"] % 2, **data.groups}
    data = replace(data, groups=groups, group_names={"camera": ("film", "photo"), **data.group_names})
    assert dealt(build(source=data, partition="domain", heldout_domain="photo")) == dealt(federation)
    # without an official split all of it is shifted
    assert samples_of(toy(partition="domain", heldout_domain="photo").shifted["photo"]) == photo


def test_several_domains_are_held_out_with_another_partition() -> None:
    held = {"heldout_domain": ["art", "word"], "heldout_clients": 1}
    federation = toy(partition="dirichlet", clients=4, **held)
    assert (federation.num_clients, federation.names[-2:]) == (4, ("art", "word"))
    assert set((np.concatenate(federation.train[:5]) // 32 % 4).tolist()) == {1, 2}
    assert list(federation.shifted) == ["art", "word"]


def test_a_public_part_of_the_same_source_is_taken_from_all_clients() -> None:
    federation = toy(True, public="toy", public_samples=50, heldout_clients=1)
    rows = samples_of(federation.public)
    assert len(rows) == 50
    assert not rows & ({*rows_of(federation, *PARTS)} | TESTED)


def test_public_samples_of_the_clients_own_source_are_set_aside_however_it_is_named() -> None:
    own = source()
    modules.load([__name__])
    named: dict[str, Any] = {"name": f"{__name__}:source", "public": f"{__name__}:source"}
    by_name, by_object, by_module = (
        build(**how, public_samples=50)
        for how in ({"source": own, "public": "toy"}, {"source": own, "public": own}, named)
    )
    assert torch.equal(by_name.public.x, by_object.public.x)
    assert torch.equal(by_name.public.x, by_module.public.x)
    assert [len(rows_of(f, *PARTS)) for f in (by_name, by_object, by_module)] == [len(own) - 50] * 3


def test_public_samples_of_another_source_are_scaled_by_training() -> None:
    """With raw numbers, samples of the same distribution would be strange to every model."""
    federation = toy(normalise="federated", public=other(source().x[:9]))
    raw = source().x[federation.part("train").flat()]
    wanted = (source().x[:9] - raw.mean(dim=0)) / raw.std(dim=0)
    torch.testing.assert_close(federation.public.x, wanted)


def test_public_labels_are_blanked_and_another_source_is_drawn_by_the_seed() -> None:
    public = toy(public="toy").public
    assert (len(public), bool(public.y.any())) == (102, False)
    numbered = other(torch.arange(400.0).view(200, 2), torch.arange(200), 200)
    a, again, b = (toy(public=numbered, public_samples=30, seed=s).public.x[:, 0].tolist() for s in [0, 0, 1])
    assert len(set(a)) == 30
    assert a == again != b


def test_clients_have_standard_training_features() -> None:
    federation = toy(normalise="client", heldout_domain="art", public="toy")
    for rows in federation.train:
        x = federation.source.x[torch.from_numpy(rows)]
        torch.testing.assert_close(x.mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(x.std(dim=0), torch.ones(2), atol=1e-5, rtol=0)
    # The shifted domain is scaled by its own client, the public set by all training clients.
    assert abs(float(federation.shifted["art"].x.mean())) < 0.2
    assert abs(float(federation.public.x.mean())) < 0.3


LOCAL = replace(source(), group_names={"client": WRITERS, "domain": ("local", *DOMAINS[1:])})
ALPHA = {"partition": "dirichlet", "partition_options": {"alpha": 0.001, "min_size": 0}, "clients": 60}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"samples": 0}, ConfigError, "samples = 0"),
        ({"heldout_clients": ["writer9"]}, ConfigError, "'writer9'"),
        ({"heldout_clients": 8}, ConfigError, "leaves 0 to train"),
        ({"heldout_clients": -1}, ConfigError, "heldout_clients = -1"),
        ({"heldout_clients": pd.Series(["Miller"])}, ConfigError, "^((?!Miller).)*$"),
        ({"heldout_domain": "photos"}, ConfigError, "Did you mean 'photo'"),
        ({"source": LOCAL, "heldout_domain": "local"}, ConfigError, "data.heldout_domain: 'local' is also"),
        ({"source": None, "heldout_domain": "photo"}, DataError, "'digits'"),
        ({"public": other(torch.zeros(5, 3))}, DataError, r"\[3\].*\[2\]"),
        ({"public": other(torch.zeros(5, 2)), "public_samples": 6}, DataError, "5 samples.*=6"),
        ({"public": "toy", "public_samples": 1024}, DataError, "public set of 1024"),
        ({"public": "toy", "public_samples": 0}, ConfigError, "public_samples = 0"),
        ({"public": "tinyimagenett"}, ConfigError, "'tinyimagenet'"),
        ({"normalise": "clients"}, ConfigError, "Did you mean 'client'"),
        ({"normalise": "client", "corruptions": {}}, ConfigError, "normalise='client'"),
        ({"partition": "natural", "partition_options": {"group": "ward"}}, DataError, "'client', 'domain'"),
        ({"source": None, "partition": "domain"}, DataError, "'digits' has none"),
        *(({"seed": seed}, ConfigError, "seed") for seed in (-1, 1.5, True)),
        *(({"split": split}, ConfigError, "split") for split in ("perfed", {"trian": 0.5}, {"train": 1.5})),
        ({"corruptions": {"kind": "fog"}}, ConfigError, "Did you mean 'corruptions.kinds'"),
        ({"corruptions": {"severities": [0]}}, ConfigError, "severities.0 = 0"),
        ({"corruptions": {"severities": []}}, ConfigError, "not be empty"),
        (ALPHA, DataError, "no training samples"),
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


def test_corrupted_sets_are_of_the_test_images_of_training_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With corruptions that change nothing, which rows they are of can be read off; the seed is passed on."""
    seeds: list[int] = []

    def corrupted(source: Source, rows: Any, options: Any, seed: int) -> dict[str, Source]:
        seeds.append(seed)
        rows = torch.from_numpy(rows)
        return {"fog-1": other(source.x[rows], rows, 400)}

    monkeypatch.setattr(build_module, "corrupted_sets", corrupted)
    numbered = other(torch.zeros(400, 1, 8, 8), torch.arange(400) % 4, 4)
    found = build(source=numbered, partition="iid", corruptions={}, clients=5, heldout_clients=1, seed=3)
    tested = set(np.concatenate([found.test[i] for i in range(5)]).tolist())
    assert set(found.shifted["fog-1"].y.tolist()) == tested
    assert not tested & set(rows_of(found, "train", "val"))
    assert seeds == [3]


@pytest.mark.slow
def test_ten_thousand_clients_are_built_in_seconds() -> None:
    y = torch.randint(0, 10, (200_000,), generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    federation = build(source=other(torch.zeros(200_000, 4), y, 10), partition="dirichlet", clients=10_000)
    assert time.process_time() - started < 6.0  # about 0.7 s on an idle core
    assert federation.sizes().min() >= 7


def test_public_constants_stay_where_clients_join_in_turn() -> None:
    images = torch.arange(8 * 3 * 4 * 4).reshape(8, 3, 4, 4).to(torch.uint8)
    toy = other(images, torch.arange(8) % 2, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    rows = Rows.of([np.arange(0, 4), np.arange(4, 8)])
    clients = Dealt(rows, None, ("a", "b"), 2, np.empty(0, dtype=np.int64))
    federation = split_in_turn(toy, clients, (("a",), ("b",)), read_split(None, False), 0)
    assert (federation.source.mean, federation.source.std) == (toy.mean, toy.std)
