"""One data set, held once: the type that loaders return, partitions cut into clients and training augments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from tailorfl.data.storage import is_known_finite
from tailorfl.errors import DataError, check_known
from tailorfl.hashing import below, fold_key
from tailorfl.partition.rows import Ints
from tailorfl.printable import harmful, visible
from tailorfl.settings.data import Augmentation

Task = Literal["classification", "binary", "multilabel", "regression", "counts", "survival", "generation"]
"""The meaning of a target, and with it the loss.

`classification`: one of `outputs` classes, softmax cross-entropy. `binary`: class 0 or 1 from ONE output,
cross-entropy on its logit, decided at probability 0.5. `multilabel`: `outputs` independent 0/1 labels.
`regression`: `outputs` real targets, loss `0.5 * (prediction - y)**2` summed over outputs, mean over samples.
`counts`: `outputs` whole numbers of at least 0, how often something happens; an output is the logarithm of a mean,
Poisson loss `exp(output) - y * output` summed and averaged likewise. `survival`: (event, time), Cox loss.
`generation`: a text to be continued, cross-entropy of each token of the response given the tokens before it, mean over
the response, then over samples; `outputs` is the vocabulary.
"""

NO_TARGET = -100
"""The target of a token that a generation task does not predict: of the prompt, and of padding."""
PADDING = 4
"""Black pixels around an image before it is cropped to its old size."""
_STREAM = 0x696D616765  # "image": separates these draws from others of a batch's key, such as dropout masks


@dataclass(frozen=True, eq=False)
class Source:
    """One data set; clients are rows of it, so no sample is ever stored twice.

    Attributes:
        name: name of the set, for messages and tables.
        x: `[samples, ...]` float32 features, uint8 images `[samples, channels, height, width]`, or int64 token ids
            `[samples, length]`, padded with `info["pad"]` (0 by default). Float images have the same order; four axes
            of which the last looks like channels are refused.
        y: `[samples]` int64 for classification and binary; `[samples, outputs]` float32 for multilabel (0/1),
            regression and counts; `[samples, 2]` float32 (event 0/1, time) for survival; `[samples, length]` int64 for
            generation, the token of `x` where it belongs to the response and else `NO_TARGET`.
        task: the meaning of `y`.
        outputs: number of model outputs: classes, labels, targets or tokens; 1 for binary and survival.
        test: `[samples]` bool, True for the official test part; None if the set has no official split.
        groups: natural ids by kind, each `[samples]` int64, e.g. `{"client": ..., "domain": ...}`.
        group_names: for each kind of group the name of every id.
        mean, std: one number per channel, applied to uint8 images after division by 255.
        info: further facts: the optimum of a synthetic problem, the names of the classes and features, the
            tokenizer, how numbers were scaled (`tailorfl.data.scaling`).
        credit: `[samples, outputs]` float32 in [0, 1], the credit of each answer in a classification task;
            None if only the right class earns any.
        augment: how uint8 images are changed at random for training, see `augment`; only training and
            distillation on the server see changed ones.

    Raises:
        DataError: if shapes or types do not fit together.
    """

    name: str
    x: Tensor
    y: Tensor
    task: Task
    outputs: int
    test: Tensor | None = None
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    credit: Tensor | None = None
    augment: Augmentation = "none"

    def __post_init__(self) -> None:
        # Names are printed, also in tables and pages; this is the only place where they enter.
        object.__setattr__(self, "name", clean_name(str(self.name)))
        kinds = {clean_name(kind): clean_names(names) for kind, names in self.group_names.items()}
        object.__setattr__(self, "group_names", kinds)
        object.__setattr__(self, "info", clean_info(self.info))
        self._check_inputs()
        self._check_targets()
        self._check_credit()
        for kind, ids in self.groups.items():
            self._expect(f"groups['{kind}']", ids, (len(self),), torch.int64)
            names = self.group_names.get(kind)
            if names is None or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(names)):
                raise DataError(
                    f"source '{self.name}': group_names['{kind}'] must name every id of groups['{kind}']"
                )
        if self.test is not None:
            self._expect("test", self.test, (len(self),), torch.bool)

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.x.shape[0])

    @property
    def holds_tokens(self) -> bool:
        """Whether samples are token ids and not numbers to calculate with."""
        return self.x.dtype == torch.int64

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample as the model sees it."""
        return tuple(self.x.shape[1:])

    @cached_property
    def strata(self) -> Tensor:
        """`[samples]` int64 label by which partitions balance or skew.

        The class; for multilabel the id of the combination of labels; for survival the event; else 0.
        """
        return strata_of(self.y, self.task)

    def take(self, rows: Tensor) -> Tensor:
        """Return the samples `rows`, `[...]` int64 -> `[..., *input_shape]` float32; images are normalised.

        Token ids stay int64.
        """
        return self._normalised(self._picked(rows))

    def take_augmented(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the samples `rows` for training, `[clients, batch]` int64 -> `[clients, batch, *input_shape]`.

        `keys` `[clients]` int64 decide how images are changed, see `augment`; `rows` of one client `[batch]` have a key
        without axes.
        """
        x = self._picked(rows)
        return self._normalised(x if self.augment == "none" else augment(x, keys, self.augment))

    def batch(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples `rows` as from `take_augmented`, and their targets."""
        return self.take_augmented(rows, keys), self.targets(rows)

    def feed(self, digest: Any) -> None:
        """Add the samples to a digest: their numbers, name and task, and how images are normalised and augmented."""
        facts = (self.name, self.task, self.outputs, self.mean, self.std, self.augment)
        digest.update(repr(facts).encode())
        for tensor in (self.x, self.y, self.test, self.credit):
            if tensor is not None:
                digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

    @property
    def original(self) -> Source:
        """The samples as they were given: another data set if these are outputs of a network."""
        return self

    def at_hand(self, device: torch.device) -> Source:
        """Return the data set with every sample in `x`, for callers that need more than `take`.

        Missing samples are computed on `device`.
        """
        return self

    def _picked(self, rows: Tensor) -> Tensor:
        # index_select copies whole samples and is several times faster than advanced indexing.
        return self.x.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *self.x.shape[1:])

    def _normalised(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return x
        x = x.to(torch.float32).div_(255.0)
        if self.mean is None or self.std is None:
            return x
        mean = torch.tensor(self.mean, device=x.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(-1, 1, 1)
        return x.sub_(mean).div_(std)

    def targets(self, rows: Tensor) -> Tensor:
        """Return the targets of the samples `rows`, `[...]` int64 -> `[...]` or `[..., outputs]`."""
        return self.y.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *self.y.shape[1:])

    def _expect(self, field_name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise DataError(
                f"source '{self.name}': {field_name} must be {dtype} of shape {list(shape)}, "
                f"but is {tensor.dtype} of shape {list(tensor.shape)}"
            )

    def _check_inputs(self) -> None:
        if self.x.dim() < 2 or self.x.dtype not in (torch.float32, torch.uint8, torch.int64):
            raise DataError(
                f"source '{self.name}': x must be float32 [samples, ...], uint8 images [samples, channels, height, "
                f"width] or int64 tokens [samples, length], but is {self.x.dtype} of shape {list(self.x.shape)}"
            )
        if self.holds_tokens and (self.x.dim() != 2 or bool((self.x < 0).any())):
            raise DataError(
                f"source '{self.name}': int64 x are token ids [samples, length] counted from 0, but x has shape "
                f"{list(self.x.shape)} and {int((self.x < 0).sum())} negative numbers; other features must be float32"
            )
        if self.x.dtype == torch.uint8 and self.x.dim() != 4:
            raise DataError(
                f"source '{self.name}': uint8 images must be [samples, channels, height, width], "
                f"but x has shape {list(self.x.shape)}"
            )
        if self.x.dim() == 4 and self.x.shape[3] in (1, 3, 4) and min(self.x.shape[1:3]) > 4:
            raise DataError(
                f"source '{self.name}': x of shape {list(self.x.shape)} looks like images [samples, height, width, "
                "channels], but the expected order is [samples, channels, height, width]; pass x.permute(0, 3, 1, 2), "
                "or x.transpose(0, 3, 1, 2) for an array. Samples that are not images can be passed as vectors: "
                "x.flatten(1)"
            )
        check_known("augmentation", self.augment, get_args(Augmentation))
        if self.augment != "none" and self.x.dtype != torch.uint8:
            raise DataError(
                f"source '{self.name}' cannot be augmented (augment={self.augment}): augmentation needs uint8 images, "
                f"but x is {self.x.dtype} of shape {list(self.x.shape)}; leave augment at none"
            )
        if (self.mean is None) != (self.std is None):
            raise DataError(f"source '{self.name}': give both mean and std, or neither")
        if self.mean is not None and self.std is not None:
            if self.x.dtype != torch.uint8:
                raise DataError(
                    f"source '{self.name}': mean and std are for uint8 images; scale float features yourself"
                )
            if not len(self.mean) == len(self.std) == self.x.shape[1] or min(self.std) <= 0:
                raise DataError(
                    f"source '{self.name}': mean and std need one number per channel, std above zero"
                )

    def _check_targets(self) -> None:
        tasks = get_args(Task)
        if self.task not in tasks:
            raise DataError(
                f"source '{self.name}': task must be one of {', '.join(tasks)}, but is '{self.task}'"
            )
        if self.outputs < 1 or (self.task in ("binary", "survival") and self.outputs != 1):
            raise DataError(f"source '{self.name}': a {self.task} task cannot have outputs={self.outputs}")
        if self.task == "generation":
            self._check_responses()
        elif self.task in ("classification", "binary"):
            self._expect("y", self.y, (len(self),), torch.int64)
            classes = 2 if self.task == "binary" else self.outputs
            wrong = ((self.y < 0) | (self.y >= classes)).nonzero()[:, 0]
            if len(wrong):
                raise DataError(
                    f"source '{self.name}': labels must lie in 0..{classes - 1}, but {len(wrong)} of {len(self)} do "
                    f"not, first the label of sample {int(wrong[0])}, which is {int(self.y[wrong[0]])}"
                )
        else:
            width = 2 if self.task == "survival" else self.outputs
            self._expect("y", self.y, (len(self), width), torch.float32)
            self._check_numbers()

    def _check_numbers(self) -> None:
        """Check that finite targets are valid for the task."""
        y = self.y
        if self.task == "counts":
            wrong, expected = (
                (y < 0) | (y != y.round()),
                "whole numbers of at least 0 (for others, set task='regression')",
            )
        elif self.task == "multilabel":
            wrong, expected = (y != 0) & (y != 1), "0 or 1 for every label"
        elif self.task == "survival":
            event, time = y[:, :1], y[:, 1:]
            wrong, expected = ((event != 0) & (event != 1)) | (time < 0), "(event 0 or 1, time of at least 0)"
        else:
            return
        rows = (wrong & y.isfinite()).any(1).nonzero()[:, 0]
        if len(rows):
            raise DataError(
                f"source '{self.name}': targets of a {self.task} task are {expected}, but {len(rows)} of {len(self)} "
                f"samples have others, first sample {int(rows[0])}"
            )

    def _check_responses(self) -> None:
        if not self.holds_tokens:
            raise DataError(f"source '{self.name}': a generation task needs int64 token ids as x")
        self._expect("y", self.y, tuple(self.x.shape), torch.int64)
        in_response = self.y != NO_TARGET
        bad = (
            (in_response & (self.y != self.x)).any(1)
            | in_response[:, 0]
            | ~in_response.any(1)
            | (self.x >= self.outputs).any(1)
        )
        if bad.any():
            raise DataError(
                f"source '{self.name}': y of a generation task must equal x in the response and {NO_TARGET} elsewhere; "
                "the response has at least one token and does not include the first token of x, and tokens are in "
                f"0..{self.outputs - 1}. {int(bad.sum())} of {len(self)} samples differ, first sample "
                f"{int(bad.nonzero()[0])}"
            )

    def _check_credit(self) -> None:
        if self.credit is None:
            return
        if self.task != "classification":
            raise DataError(f"source '{self.name}': credit is for a classification task, not for {self.task}")
        self._expect("credit", self.credit, (len(self), self.outputs), torch.float32)
        if not bool(((self.credit >= 0) & (self.credit <= 1)).all()):
            raise DataError(f"source '{self.name}': credit must lie in 0..1")


def labelled(
    name: str,
    x: Tensor,
    y: Any,
    classes: Iterable[Any],
    *,
    groups: Mapping[str, tuple[Any, Iterable[Any]]] = {},
    info: Mapping[str, Any] = {},
    **fields: Any,
) -> Source:
    """Return a source of classes that have names.

    Args:
        name, x, fields: as in `Source`.
        y: `[samples]` numbers of the classes, a tensor or an array.
        classes: the name of each class.
        groups: by kind of group, the group number of each sample, `[samples]`, and the name of each group.
        info: further facts.
    """
    class_names = tuple(map(str, classes))
    return Source(
        name=name,
        x=x,
        y=torch.as_tensor(y, dtype=torch.int64),
        task="classification",
        outputs=len(class_names),
        groups={kind: torch.as_tensor(ids, dtype=torch.int64) for kind, (ids, _) in groups.items()},
        group_names={kind: tuple(map(str, names)) for kind, (_, names) in groups.items()},
        info={"classes": class_names, **info},
        **fields,
    )


S = TypeVar("S", bound=Source)


def copied(kind: type[S], source: Source, **changes: Any) -> S:
    """Return a data set of class `kind` with the fields of `source` and the `changes`, without checking it again."""
    copy = object.__new__(kind)
    copy.__dict__.update({name: getattr(source, name) for name in Source.__dataclass_fields__} | changes)
    return copy


def subset(source: Source, rows: Ints, name: str) -> Source:
    """Copy the samples `rows` into a separate source, without groups and official split."""
    taken = torch.from_numpy(rows)
    return replace(
        source,
        name=name,
        x=source.x[taken],
        y=source.y[taken],
        test=None,
        groups={},
        group_names={},
        credit=None if source.credit is None else source.credit[taken],
    )


def strata_of(y: Tensor, task: Task) -> Tensor:
    """Return `[samples]` int64 label by which targets `y` of a task are balanced, see `Source.strata`."""
    if task == "multilabel":
        combination: Tensor = torch.unique(y, dim=0, return_inverse=True)[1]
        return combination
    if task == "survival":
        return y[:, 0].to(torch.int64)
    if task in ("regression", "counts", "generation"):
        return torch.zeros(len(y), dtype=torch.int64)
    return y


def check_finite(source: Source) -> None:
    """Check that every feature and target is a finite number.

    Raises:
        DataError: names how many samples hold NaN or infinity, the first of them and its natural client if it
            has one.
    """
    for field_name, values in (("x", source.x), ("y", source.y)):
        if not values.is_floating_point() or all_finite(values):
            continue
        bad = torch.nonzero(~torch.isfinite(values).flatten(1).all(dim=1)).flatten()
        if not bad.numel():
            continue
        first = int(bad[0])
        clients = source.groups.get("client")
        owner = "" if clients is None else f" (client '{source.group_names['client'][int(clients[first])]}')"
        raise DataError(
            f"source '{source.name}': {field_name} holds NaN or infinity in {bad.numel()} of {len(source)} "
            f"samples, the first is sample {first}{owner}; remove or fill them"
        )


def all_finite(values: Tensor) -> bool:
    """Return whether all `values` are known to be finite numbers, reading each once.

    False may also mean that their sum overflows. Values that were checked when their file was written are not read.
    """
    return is_known_finite(values) or bool(torch.isfinite(values.sum()))


LONGEST_NAME = 200
"""Maximum number of characters of the name of a client, a class or a column."""


NAMED = ("classes", "features")
"""Keys of `Source.info` whose values are names."""


def clean_name(name: str) -> str:
    """Return a name with control characters escaped, not longer than `LONGEST_NAME`."""
    printable = visible(name)
    return (
        printable if len(printable) <= LONGEST_NAME else f"{printable[: LONGEST_NAME - 10]}…{_digits(name)}"
    )


def clean_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names cleaned by `clean_name`; different ones stay different."""
    if harmful("".join(names)) is None and max(map(len, names), default=0) <= LONGEST_NAME:
        return tuple(names)
    cleaned: dict[str, str] = {}
    for name in names:
        printable = clean_name(name)
        if cleaned.setdefault(printable, name) != name:
            printable = f"{printable[: LONGEST_NAME - 10]}…{_digits(name)}"
            cleaned[printable] = name
    printable_of = {name: printable for printable, name in cleaned.items()}
    return tuple(printable_of[name] for name in names)


def clean_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `info` of a source with the names in it cleaned."""
    clean = {
        key: clean_names([str(n) for n in info[key]]) for key in NAMED if isinstance(info.get(key), tuple)
    }
    return {**info, **clean} if any(clean[key] != info[key] for key in clean) else info


def _digits(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def augment(x: Tensor, keys: Tensor, kind: Augmentation) -> Tensor:
    """Return the images `x` [clients, batch, C, H, W] of any dtype, changed at random according to `kind`.

    The change of an image depends only on (key of its client's batch, its position in the batch). So a client sees the
    same images in every engine, and rows that pad the end of a batch do not affect the rows before them.

    flip: each is mirrored left to right with probability 1/2. flip_crop: each is also padded with 4 black (zero) pixels
    and cropped at one of (2·4 + 1)² positions. Images that are normalised afterwards thus change as by torchvision's
    RandomCrop(padding=4) and RandomHorizontalFlip before Normalize.

    Args:
        x: the images; [batch, C, H, W] with one key for one client.
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
