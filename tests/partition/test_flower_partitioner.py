"""Flower Datasets' partitioners deal here what they deal alone; where the package is missing, the error says so."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

from partition.dealing import dealt
from tailorfl.data.build import build
from tailorfl.errors import ConfigError, DataError, MissingExtraError
from tailorfl.settings.loading import load

STRATA = np.random.default_rng(0).integers(0, 6, 400)

CASES: dict[str, dict[str, Any]] = {
    "DirichletPartitioner": {"alpha": 0.3, "seed": 7},
    "PathologicalPartitioner": {"num_classes_per_partition": 2, "seed": 7},
    "ShardPartitioner": {"num_shards_per_partition": 2, "seed": 7},
    "IidPartitioner": {},
    "LinearPartitioner": {},
    "ExponentialPartitioner": {},
    "SizePartitioner": {"partition_sizes": [100, 50, 200]},
    "NaturalIdPartitioner": {},
    "InnerDirichletPartitioner": {"partition_sizes": [100, 50, 200], "alpha": 0.5, "seed": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_clients_have_the_indices_that_the_partitioner_gives_them(name: str) -> None:
    theirs = pytest.importorskip("flwr_datasets").partitioner
    datasets = pytest.importorskip("datasets")
    options = CASES[name]
    given = dict(options)
    if "partition_sizes" not in options and name != "NaturalIdPartitioner":
        given["num_partitions"] = 5
    if name not in ("IidPartitioner", "LinearPartitioner", "ExponentialPartitioner", "SizePartitioner"):
        given["partition_by"] = "label"
    alone = getattr(theirs, name)(**given)
    alone.dataset = datasets.Dataset.from_dict({"label": STRATA, "at": range(len(STRATA))})
    wanted = [sorted(alone.load_partition(k)["at"]) for k in range(alone.num_partitions)]
    found = dealt("flwr", STRATA, 5, 1, partitioner=name, options=options)
    assert [rows.tolist() for rows in found.train] == wanted
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"


def test_a_federation_is_dealt_by_it_and_the_seed_of_the_data_is_its_seed() -> None:
    pytest.importorskip("flwr_datasets")
    config = load(None, ["data.partition={flwr: DirichletPartitioner, alpha: 0.4}", "data.clients=4"])
    assert config.data.partition == "flwr"
    assert config.data.partition_options == {"partitioner": "DirichletPartitioner", "options": {"alpha": 0.4}}
    assert load(config) == config
    one, other, again = (
        build(**config.data.model_dump(exclude={"seed"}), seed=seed).sizes().tolist() for seed in (1, 2, 1)
    )
    assert one == again != other
    assert len(one) == 4


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("IidPartition", {}, ConfigError, "'IidPartitioner'"),
        ("VerticalEvenPartitioner", {}, ConfigError, "unknown partitioner"),
        ("DirichletPartitioner", {"alfa": 1}, ConfigError, "'alfa'.*'alpha'"),
        ("NaturalIdPartitioner", {"partition_by": "site"}, ConfigError, "'site'"),
        ("DirichletPartitioner", {}, ConfigError, "does not take"),
        ("SizePartitioner", {"partition_sizes": [500]}, DataError, "cannot deal"),
        ("IidPartitioner", None, DataError, "one part"),
    ],
)
def test_what_it_cannot_do_is_said(name: str, options: Any, error: type[Exception], words: str) -> None:
    pytest.importorskip("flwr_datasets")
    test = STRATA if options is None else None
    with pytest.raises(error, match=words):
        dealt("flwr", STRATA, 5, test=test, partitioner=name, options=options or {})


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(MissingExtraError, match="flwr-data"):
        build("digits", partition="flwr", clients=3)


@pytest.mark.parametrize("setting", ["data.partition={flower: IidPartitioner}", "data.partition={name: iid}"])
def test_a_group_that_names_no_partitioner_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="partition_options"):
        load(None, [setting])
