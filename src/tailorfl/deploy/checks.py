"""Checks of clients' answers at the server: each one raises an error that names the problem, or passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.federation import PARTS, Federation
from tailorfl.data.remote_federation import source_facts
from tailorfl.data.table_files import shared_columns
from tailorfl.deploy.connected_clients import QuestionOutcome
from tailorfl.deploy.messages import Packet, uses_from_facts
from tailorfl.errors import ConfigError, DataError, MessageError, TailorflError
from tailorfl.evaluation.metrics import RANGES
from tailorfl.evaluation.summary import OF_RECORD, Record
from tailorfl.printable import visible
from tailorfl.privacy import Uses
from tailorfl.runs.build import make_federation
from tailorfl.runs.files import decode, encode
from tailorfl.settings.base import LARGEST_FLOAT
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

TIMES = 10.0
"""A reply may change the server's message by this many times the median of the clients' changes."""
LARGEST_NUMBER = 1e12
"""Largest absolute value of a loss or metric that has no range of its own."""
ROUNDING = 1e-6
"""Distance by which a metric may exceed its range."""


def read_description(packet: Packet, most: int) -> Mapping[str, Any]:
    """Return the facts of a client's data.

    Raises:
        MessageError: the facts cannot be used, or the client has more than `most` samples.
    """
    sizes, source = packet.fact("sizes", dict), packet.fact("source", dict)
    shared = packet.facts.get("index") is not None
    if shared:
        packet.fact("index", int)
        packet.fact("total", int)
    elif not isinstance(source.get("features"), list):
        raise MessageError("it does not list the features of its data")
    check_sizes(sizes, PARTS if shared else ("all",), most)
    return {"index": None, **packet.facts}


def check_sizes(sizes: Mapping[str, Any], parts: Sequence[str], most: int) -> None:
    """Raise MessageError if sizes are not numbers of samples, or add up to more than `most`."""
    if sizes.keys() != set(parts) or any(type(n) is not int or n < 0 for n in sizes.values()):
        raise MessageError(f"its sizes are {str(sizes)[:80]}; expected numbers of samples")
    if sum(sizes.values()) > most:
        raise MessageError(
            f"its sizes are {str(sizes)[:80]}, but a client has at most {most:,} samples (deploy.max_samples)"
        )


def usable(
    answers: Mapping[str, QuestionOutcome], read: Callable[[str, Packet], Any], refused: dict[str, str]
) -> dict[str, Any]:
    """Return the content of usable answers; note in `refused` why others are not. Missing answers are in neither."""
    usable: dict[str, Any] = {}
    for name, answer in answers.items():
        try:
            if answer.packet is not None:
                usable[name] = read(name, answer.packet)
            elif answer.fate == "refused":
                refused[name] = answer.reason
        except (MessageError, DataError) as error:
            refused[name] = visible(f"its description of its data cannot be used: {error}")
    return usable


def check_share(name: str, facts: Mapping[str, Any], central: Federation, taken: Collection[int]) -> None:
    """Raise DataError unless a client describes a share of the experiment's data that no other client has.

    Args:
        name: the client's name.
        facts: its description of its data.
        central: the experiment's data.
        taken: the numbers of other clients in these data.
    """
    number = facts["index"]
    if not 0 <= number < len(central) or number in taken or facts["total"] != len(central):
        raise DataError(
            f"'{name}' says that it is client {number + 1} of {facts['total']}, but the experiment's data have "
            f"{len(central)} clients, and each may connect only once"
        )
    sizes = {part: int(central.sizes(part)[number]) for part in PARTS}
    if facts["sizes"] != sizes or facts["source"] != decode(encode(source_facts(central.source))):
        raise DataError(
            f"the samples of '{name}' differ from those that the experiment's data give client {number + 1}"
        )


def features_of(descriptions: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the features of each of these clients, which have files of their own."""
    return {name: list(map(str, descriptions[name]["source"]["features"])) for name in names}


def largest_group(
    names: Sequence[str], check: Callable[[Sequence[str]], object]
) -> tuple[list[str], dict[str, str]]:
    """Return the largest group of compatible clients, and for each other client why it does not fit.

    Args:
        names: the clients' names.
        check: raises a TailorflError if the descriptions of these clients do not fit together.

    Raises:
        TailorflError: the error of `check`, if two groups are equally large: then nobody can tell which is right.
    """
    everyone = list(names)
    if not everyone:
        return [], {}
    without = [[n for n in names if n != name] for name in names] if len(names) > 2 else []
    fitting = [group for group in [everyone, *without] if not _reason(check, group)]
    if everyone not in fitting and len(fitting) != 1:
        fitting, waiting = [], everyone
        while waiting:
            group: list[str] = []
            for name in waiting:
                group += [] if _reason(check, [*group, name]) else [name]
            fitting.append(group)
            waiting = [name for name in waiting if name not in group] if group else []
        fitting.sort(key=len, reverse=True)
        if len(fitting[0]) == len(fitting[1] if len(fitting) > 1 else ()):
            check(everyone)
    best = fitting[0]
    return best, {name: _reason(check, [*best, name]) for name in names if name not in best}


def _reason(check: Callable[[Sequence[str]], object], names: Sequence[str]) -> str:
    """Return why clients do not fit together, "" if they do."""
    try:
        check(names)
    except TailorflError as error:
        return visible(str(error))
    return ""


def unfit(
    config: ExperimentConfig, seed: int, descriptions: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the clients whose description does not fit those of the largest group, and why."""
    shared = any(facts["index"] is not None for facts in descriptions.values())
    central = make_federation(config, seed, None, set()) if shared else None

    def check(names: Sequence[str]) -> None:
        if len({descriptions[name]["index"] is None for name in names}) > 1:
            raise ConfigError(
                "some clients have their own file (--data) and others do not; give every client a file, or none"
            )
        if central is None or any(descriptions[name]["index"] is None for name in names):
            shared_columns(features_of(descriptions, names))
            return
        taken = set[int]()
        for name in names:
            check_share(name, descriptions[name], central, taken)
            taken.add(descriptions[name]["index"])

    return largest_group(list(descriptions), check)[1]


def check_finite(value: Any, name: str = "") -> None:
    """Raise DataError if constants computed from clients' summaries hold a number that models cannot use."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_finite(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            check_finite(part, name)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST_FLOAT:
        raise DataError(f"the constants computed from all clients' samples contain {value:g} ({name})")


def change_of(reply: Mapping[str, Tensor], payload: TensorDict) -> float:
    """Return the L2 norm of a reply's difference from the server's message, over all floating-point tensors."""
    sent, square = dict(tree.leaves(payload)), 0.0
    for name, tensor in reply.items():
        if tensor.is_floating_point():
            like = sent.get(name)
            change = tensor if like is None or like.shape != tensor.shape else tensor - like
            square += float(change.double().square().sum())
    return math.sqrt(square)


def largest_changes(changes: Mapping[int, float], samples: Mapping[int, int]) -> dict[int, float]:
    """Return the largest allowed change of each client: `TIMES` the lower median, more for one with more samples.

    A client that has k times the median number of training samples does k times as many steps, so k times as much is
    allowed. The lower median of one number per client stays within the range of the honest clients' numbers as long as
    these are more than half.

    Args:
        changes: client -> its largest accepted change, or else its present one.
        samples: client -> its number of training samples.
    """
    sizes = [change for change in changes.values() if change > 0]
    if not sizes:
        return dict.fromkeys(changes, math.inf)
    usual, share = median_low(sizes), max(1, median_low(samples[i] for i in changes))
    return {i: TIMES * usual * max(1.0, samples[i] / share) for i in changes}


def check_change(change: float, largest: float) -> None:
    """Raise MessageError if a reply changes the server's message by more than `largest`."""
    if change > largest:
        raise MessageError(
            f"its reply differs from the server's message by {change:.3g} (L2 norm), more than deploy.max_norm = "
            f"{largest:.3g}"
        )


def metrics_of(packet: Packet, names: Iterable[str], may_lack: bool) -> dict[str, Tensor]:
    """Return the numbers that a client reports with its reply, 0-d; NaN for a missing one.

    Args:
        packet: the answer.
        names: names of the numbers that the method reports.
        may_lack: whether a number may be missing, as for a client without samples in a part. All of them may always be
            missing together, as for a client whose policy has `metrics: false`.

    Raises:
        MessageError: the names differ, or a value is impossible in training.
    """
    metrics = packet.fact("metrics", dict)
    may_lack = may_lack or not any(value is not None for value in metrics.values())
    for name, value in metrics.items():
        if value is not None or not may_lack:
            check_number(name, value)
    if metrics.keys() != set(names):
        raise MessageError(f"it does not report the expected numbers: {', '.join(sorted(names)) or 'none'}")
    return {k: torch.tensor(math.nan if v is None else float(v)) for k, v in metrics.items()}


def check_number(name: str, value: Any) -> None:
    """Raise MessageError if a JSON value is not a number, or outside the metric's range."""
    low, high = RANGES.get(name, (-LARGEST_NUMBER, LARGEST_NUMBER))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = max(low - ROUNDING, -LARGEST_NUMBER), min(high + ROUNDING, LARGEST_NUMBER)
    if not number or not low <= value <= high:
        raise MessageError(
            f"it reports {name[:40]} = {str(value)[:40]}; expected a number from {low:g} to {high:g}"
        )


def check_uses(packet: Packet, expected: Uses) -> Uses:
    """Return the uses of private samples that an answer reports.

    Raises:
        MessageError: they cannot be read, or are not among the `expected` ones. Many that differ from each other would
            take the accountant hours.
    """
    uses = uses_from_facts(packet.fact("uses", list))
    if not uses <= expected:
        raise MessageError("its uses of private samples are not those of the training that it was asked for")
    return uses


def records_of(packet: Packet, client: int, round: int, samples: Mapping[str, int]) -> list[Record]:
    """Return the records that a client sent.

    Args:
        packet: the answer.
        client, round: number of the client, and of the rounds done.
        samples: requested set -> number of the client's samples in it.

    Raises:
        MessageError: the records are not the requested ones, or hold values that metrics cannot have.
    """
    records: list[Record] = []
    for row in packet.fact("records", list):
        if not isinstance(row, dict) or row.get("client") != client or row.get("round") != round:
            raise MessageError(f"a record is not for client {client} after round {round}: {str(row)[:80]}")
        # A list, since a client may send a value that cannot be hashed.
        if row.get("set") not in [*samples] or row.get("model") not in ("personal", "global"):
            raise MessageError(f"a record is for a set or model that was not requested: {str(row)[:80]}")
        if row.get("samples") != samples[row["set"]] or "loss" not in row:
            raise MessageError(f"a record has the wrong number of samples, or no loss: {str(row)[:80]}")
        for name, value in row.items():
            if name not in OF_RECORD and value is not None:
                check_number(name, value)
        values = {k: math.nan if v is None else v for k, v in row.items()}
        # JSON's true and 1.0 equal 1, but are other values in a table.
        records.append({**values, "client": client, "round": round, "samples": samples[row["set"]]})
    if len({(row["set"], row["model"]) for row in records}) < len(records):
        raise MessageError("it has two records for the same set and model")
    return records


def unlike_the_others(records: Mapping[int, Sequence[Record]]) -> set[int]:
    """Return the clients whose records have other metrics, sets or models than those of most clients."""
    kinds = {
        client: frozenset((row["set"], row["model"], frozenset(row)) for row in rows)
        for client, rows in records.items()
    }
    if not kinds:
        return set()
    ((usual, _),) = Counter(kinds.values()).most_common(1)
    return {client for client, kind in kinds.items() if kind != usual}


def stacked(parts: Sequence[Mapping[str, Tensor]]) -> TensorDict:
    """Return tensors of several clients, [clients, ...]."""
    return tree.nest(((n, torch.stack([part[n] for part in parts])) for n in parts[0]), [len(parts)])
