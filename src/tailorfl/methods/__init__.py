"""The methods; importing this package registers all of them."""

from tailorfl.methods import apfl, ditto, fedavg, fedclup, local, partial, pfedme

__all__ = ["apfl", "ditto", "fedavg", "fedclup", "local", "partial", "pfedme"]
