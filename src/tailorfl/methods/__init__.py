"""The methods; importing this package registers all of them."""

from tailorfl.methods import (
    apfl,
    ditto,
    drift,
    fedavg,
    fedclup,
    feddf,
    hypcluster,
    hypernetwork,
    local,
    mrmtl,
    partial,
    pfedme,
    plgu,
)

__all__ = [
    "apfl",
    "ditto",
    "drift",
    "fedavg",
    "fedclup",
    "feddf",
    "hypcluster",
    "hypernetwork",
    "local",
    "mrmtl",
    "partial",
    "pfedme",
    "plgu",
]
