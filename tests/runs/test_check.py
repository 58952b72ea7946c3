"""The second look: names and options that only the registries know."""

from __future__ import annotations

import pytest

from tailorfl.errors import ConfigError
from tailorfl.runs.build import check
from tailorfl.settings.loading import load, recipes


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method=dito", "Did you mean 'ditto'?"),
        ("method={name: ditto, lamb: 1}", "Did you mean 'lam'?"),
        ("method={name: ditto, lam: -1}", "lam = -1"),
        ("method={name: fedavg, server: {kind: adm}}", "server.kind = 'adm'"),
        ("model=mpl", "Did you mean 'mlp'?"),
        ("model={name: mlp, hiden: [3]}", "Did you mean 'hidden'?"),
        ("engine=vectorised", "Did you mean 'vectorized'?"),
        ("data=digit", "Did you mean 'digits'?"),
        ("data.public=mnst", "Did you mean 'mnist'?"),
        ("data={name: synthetic_linear, options: {dims: 3}}", "Did you mean 'dim'?"),
        ("data.partition=dirichlt", "Did you mean 'dirichlet'?"),
        ("data={partition: dirichlet, partition_options: {alfa: 1}}", "Did you mean 'alpha'?"),
        ("data.split={train: 0.9, val: 0.9, test: 0.5}", "add up to at most 1"),
        ("published={dito: {mean: 0.5}}", "Did you mean 'ditto'?"),
        ("methods=[{name: ditto, label: a/b}, {name: local, label: 'a b'}]", "would share the folder"),
    ],
)
def test_unknown_names_have_the_nearest_one(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(None, [override]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data={name: heart, partition: natural, partition_options: {group: client}}",
        "data={name: pacs, partition: domain, heldout_domain: sketch}",
        "data.split=perfed_ckt",
        "data.split={train: 0.8, test: official}",
    ],
)
def test_valid_settings_pass(override: str) -> None:
    check(load(None, [override]))


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_passes(name: str) -> None:
    check(load(name))
