"""What `validate` refuses and what it warns about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.data.validate import validate, weaknesses
from tailorfl.errors import DataError

Ints = NDArray[np.int64]


def rows(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def source(samples: int = 20) -> Source:
    return Source("tiny", torch.zeros(samples, 2), torch.arange(samples) % 2, "classification", 2)


def healthy() -> Federation:
    """Three clients of both classes in every part, the last held out; rows 18 and 19 belong to nobody."""
    starts = (0, 6, 12)
    return Federation(
        source=source(),
        train=tuple(np.arange(start, start + 2) for start in starts),
        val=tuple(np.arange(start + 2, start + 4) for start in starts),
        test=tuple(np.arange(start + 4, start + 6) for start in starts),
        names=("anna", "ben", "late"),
        num_clients=2,
    )


def test_nothing_to_say_about_a_healthy_federation() -> None:
    assert weaknesses(healthy()) == []


@pytest.mark.parametrize("official", [False, True])
def test_two_clients_may_have_one_test_row_where_it_is_official(official: bool) -> None:
    data, part = healthy(), torch.arange(20) >= 16
    data = replace(data, test=(rows(16, 17), rows(17, 18), rows(19)))
    if official:
        validate(replace(data, source=replace(data.source, test=part)))
        return
    with pytest.raises(DataError, match="row 17 is in the test part"):
        validate(data)


class TestErrors:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_not_finite_features_name_client_and_sample(self, value: float) -> None:
        federation = healthy()
        federation.source.x[7, 1] = value
        with pytest.raises(DataError, match=r"1 samples .* features of sample 7 of client 'ben'"):
            validate(federation)

    def test_not_finite_numbers_of_nobody_are_ignored(self) -> None:
        """Sample 19 is nobody's; as soon as the server has it, it is named."""
        federation = healthy()
        federation.source.x[19] = float("nan")
        validate(federation)
        with pytest.raises(DataError, match=r"1 samples .* sample 19 of the server"):
            validate(replace(federation, server=rows(19)))

    def test_not_finite_target(self) -> None:
        target = torch.zeros(20, 1)
        target[13] = float("nan")
        broken = Source("tiny", torch.zeros(20, 2), target, "regression", 1)
        with pytest.raises(DataError, match="target of sample 13 of client 'late'"):
            validate(replace(healthy(), source=broken))

    def test_not_finite_sample_of_the_server(self) -> None:
        federation = replace(healthy(), server=rows(18))
        federation.source.x[18] = float("nan")
        with pytest.raises(DataError, match="sample 18 of the server"):
            validate(federation)

    def test_clients_without_training_samples_are_named(self) -> None:
        federation = replace(healthy(), train=(rows(), rows(6), rows()))
        with pytest.raises(
            DataError, match=r"2 clients have no training samples: clients 'anna', 'late'; use fewer"
        ):
            validate(federation)

    def test_a_row_in_train_and_test(self) -> None:
        federation = replace(healthy(), test=(rows(0, 4), rows(10), rows(16)))
        with pytest.raises(
            DataError, match=r"row 0 is in the test part of client 'anna' and again in the train part"
        ):
            validate(federation)

    def test_a_row_at_two_clients(self) -> None:
        federation = replace(healthy(), train=(rows(0, 1), rows(1, 6), rows(12)))
        with pytest.raises(DataError, match=r"row 1 is in the train part of clients 'anna', 'ben' and again"):
            validate(federation)

    def test_a_row_of_a_client_at_the_server(self) -> None:
        with pytest.raises(DataError, match=r"row 2 is in the server's validation set of client 'anna'"):
            validate(replace(healthy(), server=rows(2)))

    def test_one_test_set_for_everybody_is_allowed(self) -> None:
        shared = rows(18, 19)
        validate(replace(healthy(), test=(shared,) * 3))
        assert weaknesses(replace(healthy(), test=(shared,) * 3)) == []

    def test_rows_that_do_not_exist(self) -> None:
        with pytest.raises(DataError, match=r"test rows must lie in 0\.\.19.* client 'ben' has row 20"):
            validate(replace(healthy(), test=(rows(4), rows(20), rows(16))))


class TestWarnings:
    def test_single_sample(self) -> None:
        federation = replace(healthy(), train=(rows(0), rows(6, 7), rows(12, 13)))
        assert "1 of 3 clients have a single training sample: client 'anna'" in weaknesses(federation)

    def test_one_class(self) -> None:
        """Guessing is perfect only where the test part has that class and no other."""
        train = (rows(0, 18), rows(6, 7), rows(12, 13))
        guessable, training = (
            "have one class only, so always guessing it is perfect there",
            "of one class only:",
        )
        for test, said, not_said in (
            (rows(4), guessable, training),  # class 0, as in training
            (rows(4, 5), training, guessable),
            (rows(5), training, guessable),
            (rows(), training, guessable),
        ):
            found = "\n".join(weaknesses(replace(healthy(), train=train, test=(test, rows(10), rows(16)))))
            assert f"1 of 3 clients have {'training samples ' if said is training else ''}" in found
            assert said in found
            assert not_said not in found

    def test_nothing_to_test_or_select_by(self) -> None:
        federation = replace(healthy(), test=(rows(), rows(10), rows(16)), val=(rows(2), rows(), rows(14)))
        found = weaknesses(federation)
        assert "1 of 3 clients have no test samples and cannot be evaluated: client 'anna'" in found
        assert "1 of 3 clients have no validation samples: client 'ben'" in found

    def test_no_validation_at_all_is_said_once(self) -> None:
        federation = replace(healthy(), val=(rows(), rows(), rows()))
        assert weaknesses(federation) == [
            "no client has validation samples, so nothing can be selected by validation"
        ]

    def test_tested_on_unseen_classes(self) -> None:
        federation = replace(
            healthy(), train=(rows(0, 18), rows(6, 7), rows(12, 13)), test=(rows(5), rows(10), rows(16))
        )
        assert any("tested mostly on classes" in w and "'anna'" in w for w in weaknesses(federation))

    def test_many_names_are_cut_short(self) -> None:
        count = 9
        federation = Federation(
            source=source(3 * count),
            train=tuple(rows(client) for client in range(count)),
            val=tuple(rows(count + client) for client in range(count)),
            test=tuple(rows(2 * count + client) for client in range(count)),
            names=tuple(f"c{client}" for client in range(count)),
            num_clients=count,
        )
        assert weaknesses(federation)[0].endswith("clients 'c0', 'c1', 'c2', 'c3', 'c4' and 4 more")
