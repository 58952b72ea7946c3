"""MyMethod keeps the contract of every method, and with λ = 0 it is local training."""

from __future__ import annotations

from my_method import MyMethod

from tailorfl.core.method import make_method
from tailorfl.testing import Check, Contract, parametrize_with_checks, twice, whole
from tailorfl.testing.small import assert_same, personal, simulation


@parametrize_with_checks(Contract(MyMethod(lam=0.5), down=whole, up=whole, trained=twice))
def test_contract(check: Check) -> None:
    """Run every check of the contract."""
    check()


def test_without_pull_it_is_local_training() -> None:
    """Compare with LocalTrain, which the method is for λ = 0; where only rounding differs, use `assert_close`."""
    mine, local = (personal(simulation(m, rounds=3)) for m in (MyMethod(lam=0), make_method("local")))
    assert_same(mine, local)
