"""Methods that tell classes apart refuse tasks without classes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from methods.settings import make
from methods.small import TRAIN, federation, model
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation


@pytest.mark.parametrize("name", ["fedas", "fedem", "fedgh", "fedphp", "fedproto", "fedtgp"])
def test_a_method_that_tells_classes_apart_refuses_a_regression(name: str) -> None:
    base = federation()
    source = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    with pytest.raises(ConfigError, match=f"{make(name).title}.*class"):
        Simulation(make(name), replace(base, source=source), model("logistic"), TRAIN)
