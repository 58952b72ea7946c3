"""Whether a run computes what frozen layers give out once (`engine.features`), and what it then runs on."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.devices import HOST
from tailorfl.engines.memory import free_memory
from tailorfl.errors import RunError
from tailorfl.models.frozen_features import SAMPLES, FeatureExtractor, NoFeaturesError, find_boundary
from tailorfl.models.functional import Model
from tailorfl.rounds.features import FeatureTable, Tables, dealt_rows
from tailorfl.settings.engine import FeaturePlace
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree

log = logging.getLogger(__name__)

MEMORY_SHARE, DISK_SHARE = 0.5, 0.9
"""Of what is free, the most that features take."""


@dataclass(frozen=True)
class FeatureSettings:
    """As `tailorfl.settings.engine` declares it; `folder` is where files are made, by default that of the system."""

    place: FeaturePlace = DEFAULT.engine.features
    gigabytes: float = DEFAULT.engine.features_memory
    folder: Path | None = None


FEATURES = FeatureSettings("off")
"""Of a run that is made by hand: its cohorts then hold the samples as they were given."""


@dataclass(frozen=True)
class Features:
    """What a run is of whose frozen front is computed once.

    Attributes:
        model: what comes after the front; of the same state as the whole network.
        federation: the samples as that reads them.
        see: any further source as that reads it.
        bytes: what all features take.
        on_disk: whether they lie in a file.
    """

    model: Model
    federation: Federation
    see: Callable[[Source], Source]
    bytes: int
    on_disk: bool

    @property
    def tables(self) -> list[FeatureTable]:
        """Those of the clients' samples, of the public set and of the shifted sets."""
        sources = (self.federation.source, self.federation.public, *self.federation.shifted.values())
        return [table for source in sources if (table := getattr(source, "table", None)) is not None]

    def compute(self) -> None:
        """Compute all of them, which otherwise happens when a sample is first asked for."""
        for table in self.tables:
            table.fill(HOST)

    def seconds(self) -> float:
        """Seconds that all of them take to compute on this machine."""
        return sum(table.seconds() for table in self.tables)


def frozen_front(
    models: Mapping[str, Model], federation: Federation, seed: int, settings: FeatureSettings
) -> tuple[Features | None, str]:
    """Return what a run goes on with, or None where it runs as it is, and why in words.

    Args:
        models: the model that clients train, by architecture.
        federation: the samples.
        seed: of the run.
        settings: whether it may, and what it may take.
    """
    reason = _hindrance(models, federation, settings)
    if reason:
        return None, reason
    (model,) = models.values()
    state, source = tree.tensors(model.init(seed)), federation.source
    try:
        boundary = find_boundary(model, state, source.take(torch.arange(SAMPLES)))
    except NoFeaturesError as no_features:
        return None, str(no_features)
    front = FeatureExtractor(model, boundary, state)
    other_sources = [s for s in (federation.public, *federation.shifted.values()) if s is not None]
    samples = len(dealt_rows(federation)) + sum(map(len, other_sources))
    size = samples * boundary.width * boundary.dtype.itemsize
    folder, reason = _where(size, settings)
    if not reason:
        tables = Tables(federation, front, folder)
        try:
            featured = replace(
                federation,
                source=tables.see(source),
                public=None if federation.public is None else tables.see(federation.public),
                shifted={name: tables.see(s) for name, s in federation.shifted.items()},
            )
        except (RunError, OSError) as error:
            reason = f"their file cannot be made: {error}"
        else:
            location = "in memory" if folder is None else f"in a file in {folder}"
            note = (
                f"frozen layers up to '{boundary.name}' are computed once for each sample: "
                f"{size / 1e6:,.1f} MB {location}"
            )
            log.info("%s", note, extra={"once": note})
            return Features(
                model.from_features(boundary.apply), featured, tables.see, size, folder is not None
            ), note
    log.warning(
        "frozen layers are computed anew in every pass, since what they give out is not kept: %s",
        reason,
        extra={"once": reason},
    )
    return None, reason


def _hindrance(models: Mapping[str, Model], federation: Federation, settings: FeatureSettings) -> str:
    """Why nothing can be computed once, whatever the networks are; "" where it may."""
    if settings.place == "off":
        return "engine.features is off"
    if not any(model.frozen for model in models.values()):
        return "nothing is frozen"
    if len(models) > 1:
        return "clients have different architectures"
    source, public = federation.source, federation.public
    if source.task == "generation":
        return "a model that generates text reads the text"
    if any(s is not None and s.augment != "none" for s in (source, public)):
        return "images are augmented, so no two passes see the same ones"
    return f"there are fewer than {SAMPLES} samples" if len(source) < SAMPLES else ""


def _where(size: int, settings: FeatureSettings) -> tuple[Path | None, str]:
    """(folder of the file that holds so many bytes, or None for memory; why they cannot be held, else "")."""
    free = free_memory(HOST)
    fits = size <= settings.gigabytes * 1e9 and (free is None or size <= MEMORY_SHARE * free)
    if settings.place == "auto" and fits:
        return None, ""
    folder = Path(tempfile.gettempdir()) if settings.folder is None else settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_on_disk = shutil.disk_usage(folder).free
    except OSError as error:
        return (
            None,
            f"it takes {size / 1e9:,.1f} GB, and '{folder}' cannot be used: {error.strerror or error}",
        )
    if size <= DISK_SHARE * free_on_disk:
        return folder, ""
    return None, (
        f"it takes {size / 1e9:,.1f} GB, of which engine.features_memory allows {settings.gigabytes:g} GB of memory, "
        f"and the disk of '{folder}' has {free_on_disk / 1e9:,.1f} GB left"
    )
