"""Checks that every method has to pass: for authors of methods, and for the library's own methods.

from tailorfl.testing import Contract, check_method, parametrize_with_checks

check_method(MyMethod(lam=0.5))  # raises AssertionError at the first check that fails

@parametrize_with_checks(Contract(MyMethod(lam=0.5), down=whole, up=whole))
def test_contract(check):  # with pytest, one test per check
    check()
"""

from tailorfl.testing import checks as checks
from tailorfl.testing import promises as promises
from tailorfl.testing.contract import (
    Check,
    Contract,
    check_method,
    checks_of,
    nothing,
    parametrize_with_checks,
    twice,
    whole,
)

__all__ = [
    "Check",
    "Contract",
    "check_method",
    "checks_of",
    "nothing",
    "parametrize_with_checks",
    "twice",
    "whole",
]
