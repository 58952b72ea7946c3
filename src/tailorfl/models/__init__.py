"""Models, pre-trained weights, keyed dropout, and the split into shared, personal and frozen tensors."""

from tailorfl.models.adapters import BottleneckAdapter, ResidualAdapter
from tailorfl.models.dropout import Dropout, dropout_key, fold_key, replace_dropout
from tailorfl.models.layers import layer_groups
from tailorfl.models.registry import available, build, options_of
from tailorfl.models.resnet import ResidualBlock
from tailorfl.models.selectors import Predicate, Selector, select
from tailorfl.models.split import Split
from tailorfl.models.weights import WeightReport, load_weights, save_weights

__all__ = [
    "BottleneckAdapter",
    "Dropout",
    "Predicate",
    "ResidualAdapter",
    "ResidualBlock",
    "Selector",
    "Split",
    "WeightReport",
    "available",
    "build",
    "dropout_key",
    "fold_key",
    "layer_groups",
    "load_weights",
    "options_of",
    "replace_dropout",
    "save_weights",
    "select",
]
