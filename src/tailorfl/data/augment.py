"""Augmented training images: random flips and crops whose randomness is a function of keys.

What happens to an image depends on (key of its client's batch, its place in the batch) alone. So a client sees the same
images in every engine, and rows that pad a batch at its end change nothing of the rows before them.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from tailorfl.errors import check_known
from tailorfl.hashing import below, fold_key
from tailorfl.settings.data import Augmentation

PADDING = 4
"""Black pixels around an image before it is cropped to its old size."""
_STREAM = 0x696D616765  # "image": apart from what else is drawn from the key of a batch, as dropout masks are


def augment(x: Tensor, keys: Tensor, kind: Augmentation) -> Tensor:
    """Return the images `x` [clients, batch, C, H, W] of any dtype, changed at random as `kind` says.

    flip: each is mirrored left to right with probability 1/2. flip_crop: each is also cut out at one of the
    (2·4 + 1)² places of itself with 4 black (zero) pixels around it, so images that are yet to be normalised get what
    torchvision's RandomCrop(padding=4) and RandomHorizontalFlip before Normalize give.

    Args:
        x: the images; [batch, C, H, W] with one key is one client's.
        keys: int64 [clients], or without axes.
        kind: none, flip or flip_crop.

    Raises:
        ConfigError: unknown kind.
    """
    check_known("augmentation", kind, get_args(Augmentation))
    if kind == "none":
        return x
    height, width = x.shape[-2:]
    position_key = fold_key(fold_key(keys, _STREAM)[..., None], torch.arange(x.shape[-4], device=x.device))
    flipped = below(2, position_key, 0)[..., None] == 1
    columns = torch.arange(width, device=x.device)
    columns = torch.where(flipped, columns.flip(0), columns)
    if kind == "flip":
        return x.gather(-1, columns[..., None, None, :].expand(x.shape))
    padded = F.pad(x, (PADDING,) * 4)
    down, right = (below(2 * PADDING + 1, position_key, number)[..., None] for number in (1, 2))
    rows = torch.arange(height, device=x.device) + down
    pixels = rows[..., :, None] * padded.shape[-1] + (columns + right)[..., None, :]
    chosen = pixels.flatten(-2)[..., None, :].expand(*x.shape[:-2], height * width)
    return padded.flatten(-2).gather(-1, chosen).reshape(x.shape)
