"""The hospital federations follow the published protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from tailorfl.data.registry import load_source
from tailorfl.data.source import Source, check_finite

Need = Callable[[str], Path]


def sizes(source: Source) -> list[tuple[int, int]]:
    """(train, test) samples of every natural client."""
    assert source.test is not None
    clients = source.groups["client"]
    return [
        (int(((clients == k) & ~source.test).sum()), int(((clients == k) & source.test).sum()))
        for k in range(len(source.group_names["client"]))
    ]


def test_heart_has_the_published_sizes_and_features(need_data: Need) -> None:
    need_data("flamby/processed.va.data")
    source = load_source("heart")
    assert sizes(source) == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert source.input_shape == (13,)
    assert (source.task, source.outputs) == ("binary", 1)
    assert source.group_names["client"] == ("cleveland", "hungarian", "switzerland", "va")
    ill = [int(source.y[source.groups["client"] == k].sum()) for k in range(4)]
    assert ill == [139, 98, 45, 101]
    check_finite(source)


def test_heart_is_standardised_by_each_clients_own_training_part(need_data: Need) -> None:
    need_data("flamby/processed.va.data")
    source = load_source("heart")
    assert source.test is not None
    for client in range(4):
        train = source.x[(source.groups["client"] == client) & ~source.test].double()
        torch.testing.assert_close(train.mean(0), torch.zeros(13, dtype=torch.float64), atol=1e-6, rtol=0)
        std = train.std(0, correction=1)
        # the cholesterol of one hospital is 0 throughout and stays 0
        expected = torch.ones(13, dtype=torch.float64)
        if client == 2:
            expected[3] = 0
        torch.testing.assert_close(std, expected, atol=1e-6, rtol=0)


def test_publicly_scaled_heart_is_a_function_of_each_patient_alone(need_data: Need) -> None:
    """(x − c)/s cut off at ±3 of the file's own columns, with guidelines' constants; the split is the protocol's."""
    path = need_data("flamby/processed.cleveland.data")
    source, protocol = load_source("heart", scaling="public"), load_source("heart")
    assert source.test is not None
    assert protocol.test is not None
    assert torch.equal(source.test, protocol.test)
    assert torch.equal(source.y, protocol.y)
    assert source.info["features"] == protocol.info["features"]
    assert source.info.get("private scaling") is None
    assert "each client's own" in str(protocol.info["private scaling"])
    raw = pd.read_csv(path, header=None, na_values="?").drop(columns=[10, 11, 12]).dropna().to_numpy()
    own = source.x[source.groups["client"] == 0].double().numpy()
    constants = {
        0: (50, 10),
        1: (0, 1),
        3: (120, 20),
        4: (200, 40),
        5: (0, 1),
        7: (145, 25),
        8: (0, 1),
        9: (1, 1),
    }
    for place, (column, (middle, scale)) in enumerate(constants.items()):
        assert own[:, place] == pytest.approx(((raw[:, column] - middle) / scale).clip(-3, 3), abs=1e-6)
    for place, (column, value) in enumerate([(2, 2), (2, 3), (2, 4), (6, 1), (6, 2)], start=8):
        assert own[:, place].tolist() == (raw[:, column] == value).astype(float).tolist()


def test_heart_split_keeps_the_share_of_the_ill_where_it_is_stratified(need_data: Need) -> None:
    need_data("flamby/processed.va.data")
    source = load_source("heart")
    assert source.test is not None
    for client in (0, 1, 3):
        mine = source.groups["client"] == client
        shares = [float(source.y[mine & (source.test == part)].double().mean()) for part in (False, True)]
        assert shares[0] == pytest.approx(shares[1], abs=0.02)


def test_tcga_has_the_published_sizes_and_survival_targets(need_data: Need) -> None:
    need_data("flamby/brca.csv")
    source = load_source("tcga")
    assert sizes(source) == [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
    assert source.input_shape == (39,)
    assert (source.task, source.outputs) == ("survival", 1)
    assert set(source.y[:, 0].tolist()) == {0.0, 1.0}
    assert float(source.y[:, 1].min()) >= 0
    assert torch.equal(source.strata, source.y[:, 0].long())
    check_finite(source)


def test_tcga_equals_the_same_patients_in_their_other_file(need_data: Need) -> None:
    need_data("flamby/brca.csv")
    table = pd.read_parquet(need_data("tabular/tcga_brca.parquet"))
    source = load_source("tcga")
    assert source.test is not None
    for client, region in enumerate(source.group_names["client"]):
        for part in ("train", "test"):
            rows = table[(table.region == region) & (table.split == part)]
            theirs = torch.tensor(rows.drop(columns=["split", "region"]).to_numpy("float32"))
            mine = (source.groups["client"] == client) & (source.test == (part == "test"))
            ours = torch.cat([source.x[mine], source.y[mine]], dim=1)
            # the files may list patients in another order
            assert sorted(ours.tolist()) == sorted(theirs.tolist())
