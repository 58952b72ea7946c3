"""Gradient-boosted trees of scikit-learn (HistGradientBoosting) as the tensors of a `TreeEnsemble`.

`fitted` grows an ensemble with scikit-learn. `continued` grows trees on top of an ensemble, from the gradient g and
second derivative h of the loss at its outputs, so that a leaf's value is η · −Σ g / (Σ h + λ), as in scikit-learn:

    classes    g_k = p_k − [y = k],  h_k = p_k (1 − p_k)          numbers    g = F(x) − y,  h = 1

Missing cells and words are passed to scikit-learn as in the original table, since prepared rows show both. A number is
missing if an indicator says so (`data.options.indicator`), or else if it equals the mean that fills gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.constants import Constants
from tailorfl.data.preparation import PREPARATION
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.tree_ensemble import BITS, TableColumns, TreeEnsemble
from tailorfl.training import tree
from tailorfl.training.operations import TrainingSamples

TASKS = ("classification", "binary", "regression")
"""Tasks that trees can be grown for."""
MOST_FEATURES = torch.iinfo(torch.int16).max
"""Largest number of features; nodes name theirs by an int16."""
Numbers = NDArray[np.float64]
Arrays = dict[str, Tensor]
"""The state of a `TreeEnsemble`."""


def table_columns(source: Source) -> TableColumns:
    """Return how raw features are read from a source's rows: as its table says, else each column is a number.

    Features of words come first, as in scikit-learn.
    """
    prepared = source.info.get(PREPARATION)
    if prepared is None:
        columns = [(number, 1, 0, 0) for number in range(source.x[0].numel())]
        return TableColumns(torch.tensor(columns), torch.full((len(columns),), torch.nan), words=0)
    constants: Constants = prepared.everyone
    mean_fills = constants.roles.impute == "mean" and not constants.roles.indicator
    order = sorted(constants.columns, key=lambda name: constants.columns[name].kind == "number")
    columns, gaps = [], torch.full((len(order),), torch.nan)
    for name, column in constants.columns.items():
        number = order.index(name)
        if column.kind == "number":
            columns.append((number, 1, 0, 0))
            gaps[number] = (column.fill - column.mean) / column.deviation if mean_fills else torch.nan
        else:
            columns += [(number, code, 1, 0) for code in range(len(column.levels))]
        columns += [(number, 0, 0, 1)] if column.indicator else []
    words = sum(column.kind == "word" for column in constants.columns.values())
    return TableColumns(torch.tensor(columns), gaps, words)


def ensemble(source: Source, iterations: int, leaves: int) -> Model:
    """Return the model of an ensemble without trees for a source.

    Raises:
        ConfigError: it has more features than a node can name.
    """
    # The most levels of a feature, counted by column names, which a server without samples has as well.
    levels = Counter(name.partition("=")[0] for name in source.info.get("features", ()))
    words, columns = max(levels.values(), default=1), table_columns(source)
    if len(columns.gap) > MOST_FEATURES:
        raise ConfigError(
            f"trees read at most {MOST_FEATURES} features, but '{source.name}' has {len(columns.gap)}; leave some "
            "out, or choose another method"
        )
    two = source.task == "classification" and source.outputs == 2
    trees = 1 if two else source.outputs
    factory = partial(TreeEnsemble, columns, iterations, trees, leaves, words, two)
    return Model(factory, trainable=lambda name, *_: not name.startswith("columns."))


def blank(model: Model, iterations: int) -> Arrays:
    """Return the tensors of an ensemble of empty trees."""
    start = tree.tensors(model.init(0))
    return {n: t if n == "baseline" else t.new_zeros((iterations, *t.shape[1:])) for n, t in start.items()}


def raw_rows(samples: TrainingSamples) -> Numbers:
    """Return rows as scikit-learn expects them, [rows, features], with NaN for missing cells.

    A feature that is missing in all rows is set to a constant, and never split.
    """
    columns: Any = samples.model.module.columns
    raw, missing = columns(samples.x)
    x: Numbers = raw.double().masked_fill(missing, torch.nan).numpy()
    x[:, missing.all(0).numpy()] = 0.0
    return x


def fitted(samples: TrainingSamples, state: TensorDict, *, max_iter: int, **settings: Any) -> Arrays:
    """Return scikit-learn's ensemble on a client's samples; `state` itself if one of its trees splits."""
    if not len(samples.y) or bool(state["left"].any()):
        return dict(tree.tensors(state))
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    x, y, arrays = raw_rows(samples), samples.y.numpy(), blank(samples.model, max_iter)
    arrays["baseline"] = torch.from_numpy(baseline(samples)).float()
    settings["max_iter"] = max_iter if samples.steps is None else max(min(max_iter, samples.steps), 1)
    if samples.source.task == "regression":
        for output in range(y.shape[1]):
            write(arrays, samples, HistGradientBoostingRegressor, (x, y[:, output]), [output], **settings)
    elif len(present := np.unique(y)) > 1:
        # With two classes, the trees are those of the second.
        slots = present[len(present) == 2 :] % len(arrays["baseline"])
        write(arrays, samples, HistGradientBoostingClassifier, (x, y), slots, **settings)
    return arrays


def baseline(samples: TrainingSamples) -> Numbers:
    """Return the outputs without trees, [trees]: means of the targets, or logarithms of class shares.

    A class that the client lacks counts as half a sample. As in scikit-learn the logarithms have mean 0 over the
    present classes; with two of them, they are relative to the first.
    """
    y, classes = samples.y.numpy(), max(samples.source.outputs, 2)
    if samples.source.task == "regression":
        return np.asarray(y.mean(0, dtype=np.float64), dtype=np.float64)
    counts = np.bincount(y, minlength=classes)
    present, shares = counts > 0, np.log(np.where(counts > 0, counts, 0.5) / len(y))
    if classes == 2:
        return shares[1:] - shares[:1]
    logits: Numbers = shares - (shares[present].mean() if present.sum() > 2 else shares[present][0])
    return logits


def continued(samples: TrainingSamples, state: TensorDict, *, max_iter: int, **settings: Any) -> Arrays:
    """Return the trees that a client grows on an ensemble, and its own baseline if the ensemble has no tree yet."""
    arrays = blank(samples.model, max_iter)
    if not len(samples.y):
        return arrays
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, settings = raw_rows(samples), {**settings, "max_iter": 1, "early_stopping": False}
    if len(state["value"]):
        outputs = samples.model(tree.tensors(state), samples.x).double().numpy()[:, -len(state["baseline"]) :]
    else:
        outputs = np.tile(baseline(samples), (len(x), 1))
        arrays["baseline"] = torch.from_numpy(outputs[0]).float()
    for iteration in range(max_iter):
        gradients, curvatures = derivatives(samples, outputs)
        for k in range(outputs.shape[1]):
            rows, settings["loss"] = (x, np.zeros(len(x))), newton(gradients[:, k], curvatures[:, k])
            grown = write(arrays, samples, HistGradientBoostingRegressor, rows, [k], iteration, **settings)
            outputs[:, k] += grown.predict(x)
    return arrays


def derivatives(samples: TrainingSamples, outputs: Numbers) -> tuple[Numbers, Numbers]:
    """Return first and second derivatives of each sample's loss with respect to the outputs, [rows, trees] each."""
    from scipy.special import softmax

    y, trees = samples.y.numpy(), outputs.shape[1]
    if samples.source.task == "regression":
        return outputs - y, np.ones_like(outputs)
    logits = np.pad(outputs, ((0, 0), (int(trees == 1), 0)))  # that of the first of two classes is 0
    p, right = softmax(logits, axis=1), y[:, None] == np.arange(logits.shape[1])
    return (p - right)[:, -trees:], (p * (1 - p))[:, -trees:]


def newton(gradient: Numbers, curvature: Numbers) -> Any:
    """Return a loss for scikit-learn with these derivatives at 0, where boosting starts."""
    from sklearn._loss.loss import HalfSquaredError

    class NewtonLoss(HalfSquaredError):  # type: ignore[misc]  # noqa: N818
        def fit_intercept_only(self, y_true: Any, sample_weight: Any = None) -> Any:
            return np.zeros(1)

        def gradient_hessian(self, *, gradient_out: Any, hessian_out: Any, **_: Any) -> Any:
            gradient_out[:], hessian_out[:] = gradient, curvature
            return gradient_out, hessian_out

    return NewtonLoss(sample_weight=curvature)


def write(
    arrays: Arrays, samples: TrainingSamples, kind: Any, rows: Any, slots: Iterable[int], first: int = 0,
    **settings: Any,
) -> Any:  # fmt: skip
    """Write the trees of an estimator into the arrays of an ensemble, and return it.

    Args:
        arrays: the tensors.
        samples: of the client.
        kind: scikit-learn's class.
        rows: (x, y) to fit.
        slots: positions, within an iteration, of the estimator's trees.
        first: the iteration of its first trees.
        settings: of the estimator.
    """
    columns: Any = samples.model.module.columns
    is_word = np.arange(rows[0].shape[1]) < columns.words
    estimator = kind(categorical_features=is_word, random_state=samples.seed, **settings).fit(*rows)
    vocabulary = estimator._preprocessor.named_transformers_["encoder"].categories_ if columns.words else ()
    for iteration, predictors in enumerate(estimator._predictors, start=first):
        for slot, predictor in zip(slots, predictors, strict=True):
            for name, values in nodes_of(predictor, vocabulary, arrays["levels"].shape[3]).items():
                arrays[name][iteration, slot, : len(values)] = torch.from_numpy(values).to(arrays[name].dtype)
    return estimator


def nodes_of(predictor: Any, vocabulary: Sequence[Numbers], width: int) -> dict[str, NDArray[Any]]:
    """Return the nodes of a scikit-learn tree as arrays, `levels` in `width` numbers a node.

    `vocabulary` has, for each feature of words, the levels in the training rows, which scikit-learn renumbers.
    """
    nodes = predictor.nodes
    is_leaf, index = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
    threshold = np.where(is_leaf | ~np.isfinite(nodes["num_threshold"]), 0.0, nodes["num_threshold"])
    rounded = threshold.astype(np.float32)  # downwards: no float32 lies between the two
    rounded = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    sides = np.zeros((len(nodes), width * BITS), dtype=np.uint32)
    sides[:, 0] = ~is_leaf & (nodes["num_threshold"] == np.inf)  # all that is not missing goes left
    for k in np.flatnonzero(nodes["is_categorical"] & ~is_leaf):
        levels = [
            int(level) for level in vocabulary[nodes["feature_idx"][k]] if level == level
        ]  # without NaN
        bits = predictor.raw_left_cat_bitsets[nodes["bitset_idx"][k]]
        sides[k] = nodes["missing_go_to_left"][k]  # unseen words are treated as missing
        sides[k, levels] = [bits[code // BITS] >> (code % BITS) & 1 for code in range(len(levels))]
    shifted = sides.reshape(len(nodes), width, BITS) << np.arange(BITS, dtype=np.uint32)
    return {
        "value": np.where(is_leaf, nodes["value"], 0.0),
        "threshold": rounded,
        "feature": np.where(is_leaf, 0, nodes["feature_idx"]),
        "left": np.where(is_leaf, index, nodes["left"].astype(int)),
        "right": np.where(is_leaf, index, nodes["right"].astype(int)),
        "missing_left": nodes["missing_go_to_left"].astype(bool),
        "levels": shifted.sum(2, dtype=np.uint32).view(np.int32),
    }
