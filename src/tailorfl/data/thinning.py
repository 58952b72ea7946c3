"""Fewer of many, the same ones every time and from everywhere."""

from __future__ import annotations

from tailorfl.errors import ConfigError


def thinned(total: int, wanted: int | None) -> list[int]:
    """`wanted` ascending places at even distances out of 0..total-1; all where there are no more, or None is asked for.

    Files are often sorted by label, so that their first lines alone would be of one class.

    Raises:
        ConfigError: if `wanted` is below 1.
    """
    if wanted is not None and wanted < 1:
        raise ConfigError(f"the number of samples must be at least 1, but is {wanted}")
    if wanted is None or wanted >= total:
        return list(range(total))
    return [(2 * k + 1) * total // (2 * wanted) for k in range(wanted)]
