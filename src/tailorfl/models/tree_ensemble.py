"""Boosted decision trees as tensors, so that they are stored, sent, counted and exported like networks.

    F(x) = b + Σ_i T_i(x),     T_i(x) the value of the leaf that x reaches in tree i

A node sends a number to the left if it is at most the node's threshold, a word if it is among the node's words, and a
missing cell to the side that it learnt. A node that only tests whether a number is missing has its first word set. A
prepared table has several columns for one feature: `TableColumns` recovers the number or the word, and missing cells.

Tensors of an ensemble of I iterations with S trees each (one for every output, one for two classes), with at most N
nodes a tree: `value` float `[I, S, N]` and `baseline` `[S]` are its parameters; `threshold`, `feature`, `left`,
`right`, `missing_left` `[I, S, N]` and `levels` `[I, S, N, W]` (32 words to a number) are buffers. Node 0 is the root,
and a leaf is its own child. Several ensembles stacked `[ensembles, I, S, N]` are their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BITS = 32
"""Number of words whose side one number of `levels` encodes."""


class TableColumns(nn.Module):
    """The raw features of prepared rows: numbers, and words as numbers of their levels.

    Args:
        columns: int64 [columns, 4], for each column of the prepared table: its feature, its factor (1 for a number,
            the level's number for the 0/1 column of a level, else 0), whether it is that of a level, whether it is
            the one that marks missing cells.
        gap: [features], the number that stands for a missing cell; NaN if none does.
        words: number of features whose cells are words; they come first.
    """

    feature: Tensor
    parts: Tensor
    gap: Tensor

    def __init__(self, columns: Tensor, gap: Tensor, words: int) -> None:
        super().__init__()
        self.words = words
        self.register_buffer("feature", columns[:, 0].clone())
        self.register_buffer("parts", columns[:, 1:].T.float().contiguous())
        self.register_buffer("gap", gap)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [rows, features] of prepared rows, and which of them are missing."""
        zeros = x.new_zeros(x.shape[0], 3, self.gap.shape[0])
        sums = zeros.index_add(2, self.feature, x.flatten(1)[:, None] * self.parts)
        raw, named, flagged = sums[:, 0], sums[:, 1], sums[:, 2]
        is_word = torch.arange(self.gap.shape[0], device=x.device) < self.words
        return raw, (flagged > 0.5) | (is_word & (named < 0.5)) | (raw == self.gap)


class TreeEnsemble(nn.Module):
    """Boosted decision trees on the rows of a prepared table, without a tree at first.

    Args:
        columns: how prepared rows are read.
        iterations: I, the number of trees of each output.
        trees: S, the number of trees of an iteration.
        leaves: maximum number of leaves of a tree.
        words: maximum number of levels of a feature of words.
        two_classes: whether the only tree of an iteration is for the second of two outputs.
    """

    threshold: Tensor
    feature: Tensor
    left: Tensor
    right: Tensor
    missing_left: Tensor
    levels: Tensor

    def __init__(
        self, columns: TableColumns, iterations: int, trees: int, leaves: int, words: int, two_classes: bool
    ) -> None:
        super().__init__()
        self.columns, self.two_classes = columns, two_classes
        shape = (iterations, trees, 2 * leaves - 1)
        self.baseline = nn.Parameter(torch.zeros(trees))
        self.value = nn.Parameter(torch.zeros(shape))
        self.register_buffer("threshold", torch.zeros(shape))
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int16))
        self.register_buffer("missing_left", torch.zeros(shape, dtype=torch.bool))
        self.register_buffer("levels", torch.zeros((*shape, -(-words // BITS)), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [rows, outputs] of prepared rows."""
        raw, missing = self.columns(x)
        trees, nodes, width = self.baseline.shape[0], self.value.shape[-1], self.levels.shape[-1]
        count = self.value.numel() // nodes
        feature = self.feature.reshape(count, nodes).T.long()
        threshold = self.threshold.reshape(count, nodes).T
        left = self.left.reshape(count, nodes).T.long()
        right = self.right.reshape(count, nodes).T.long()
        missing_left = self.missing_left.reshape(count, nodes).T
        levels = self.levels.reshape(count, nodes * width).T.long()
        node = torch.zeros(x.shape[0], count, dtype=torch.int64, device=x.device)
        for _ in range(nodes // 2):  # no leaf is deeper
            column = feature.gather(0, node)
            cell, is_word = raw.gather(1, column), column < self.columns.words
            code = torch.where(is_word, cell, 0.0).long()
            sides = levels.gather(0, node * width + code // BITS) >> code % BITS
            goes_left = (sides & 1 > 0) | (~is_word & (cell <= threshold.gather(0, node)))
            goes_left = torch.where(missing.gather(1, column), missing_left.gather(0, node), goes_left)
            node = torch.where(goes_left, left.gather(0, node), right.gather(0, node))
        leaf = self.value.reshape(count, nodes).T.gather(0, node)
        outputs = self.baseline + leaf.reshape(x.shape[0], count // trees, trees).sum(1)
        return torch.cat([torch.zeros_like(outputs), outputs], 1) if self.two_classes else outputs
