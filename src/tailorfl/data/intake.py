"""What comes from outside into a source: names that can be printed, and arrays of plain real numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.errors import DataError
from tailorfl.printable import harmful, visible

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

LONGEST_NAME = 200
"""Characters of the name of a client, a class, a column."""
NAMED = ("classes", "features")
"""What of `Source.info` are names."""


def clean_name(name: str) -> str:
    """Returns a name without control characters, which are written out, and not longer than `LONGEST_NAME`."""
    shown = visible(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 10]}…{_digits(name)}"


def clean_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names as `clean_name` has them; different ones stay different."""
    if harmful("".join(names)) is None and max(map(len, names), default=0) <= LONGEST_NAME:
        return tuple(names)
    cleaned: dict[str, str] = {}
    for name in names:
        shown = clean_name(name)
        if cleaned.setdefault(shown, name) != name:
            shown = f"{shown[: LONGEST_NAME - 10]}…{_digits(name)}"
            cleaned[shown] = name
    kept = {name: shown for shown, name in cleaned.items()}
    return tuple(kept[name] for name in names)


def clean_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what else is known of a source, with the names among it cleaned."""
    found = {
        key: clean_names([str(n) for n in info[key]]) for key in NAMED if isinstance(info.get(key), tuple)
    }
    return {**info, **found} if any(found[key] != info[key] for key in found) else info


def real_tensor(values: Any, what: str) -> Tensor:
    """Returns `values` as a tensor.

    Args:
        values: numbers as a tensor, an array or nested lists.
        what: they are, for messages.

    Raises:
        DataError: they are no such numbers, or sparse, or complex, of which float32 would keep a part.
    """
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"{what} must be an array of numbers, but cannot be read as one: it is a {type(values).__name__}"
        ) from error
    if found.is_complex():
        raise DataError(
            f"{what} holds complex numbers, of which only the real part would be kept; give real and imaginary parts "
            "as features of their own"
        )
    if found.layout != torch.strided:
        raise DataError(f"{what} is a sparse tensor; give its to_dense()")
    if found.is_quantized or found.is_meta or not found.dim():
        kind = (
            "is quantized" if found.is_quantized else "holds no numbers" if found.is_meta else "is one number"
        )
        raise DataError(f"{what} {kind}; give a plain array with one entry a sample")
    return found.detach()


def flags(values: Any, what: str) -> Tensor:
    """Returns `values` as bool. Raises DataError for anything but True and False, 1 and 0."""
    found = real_tensor(values, what)
    if found.dtype != torch.bool and bool(((found != 0) & (found != 1)).any()):
        raise DataError(f"{what} should be True or False for each sample, but holds other values")
    return found.to(torch.bool)


def client_ids(clients: Any, name: str) -> pd.Series[Any]:
    """Returns ids of any kind, one a sample. Raises DataError where they are something else; `name` is the source's."""
    import pandas as pd

    try:
        ids = np.asarray(clients)
        if ids.dtype.kind == "U":
            "".join(ids.flat).encode()  # halves of characters, which no table and no file can hold
    except (TypeError, ValueError) as error:
        raise DataError(
            f"source '{name}': clients cannot be read as one id a sample: {type(error).__name__}"
        ) from error
    if ids.ndim != 1 or (
        ids.dtype == object and any(isinstance(one, list | tuple | dict | set) for one in ids)
    ):
        raise DataError(
            f"source '{name}': clients should be names or numbers, one a sample, got a {type(clients).__name__} of "
            f"shape {list(ids.shape)}"
        )
    return pd.Series(ids, name="clients")


def check_roles(
    label: Any,
    client: Any,
    features: Any,
    split: Any,
    words: Any = (),
    na_values: Any = (),
    exclude: Any = (),
) -> None:
    """Raises DataError where the columns that mean something are not given by name."""
    for what, given in (("client", client), ("split", split)):
        if given is not None and not isinstance(given, str):
            raise DataError(f"{what} should be the name of a column, got a {type(given).__name__}")
    lists = {"label": label, "features": features, "words": words, "na_values": na_values, "exclude": exclude}
    for what, given in lists.items():
        several = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
        if not (several or isinstance(given, str) or (given is None and what == "features")):
            raise DataError(
                f"{what} should be the name of a column or a list of names, got a {type(given).__name__}"
            )


def _digits(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
