"""`tailorfl.tune`: from Python values to a tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError
from tailorfl.runs.build import check
from tailorfl.settings.experiment import COMPARED, ExperimentConfig
from tailorfl.settings.loading import load
from tailorfl.tuning.run import Plan, Tuning, TuningRequest, begin, default_folder, plan, plan_in
from tailorfl.tuning.run import tune as tune_in


def tune(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    request: TuningRequest,
    *,
    workers: int,
    out: str | Path | None,
    resume: bool,
) -> Tuning:
    """Tune every method of an experiment; see `tailorfl.tune`."""
    folder, made = _begun(config, settings, request, out, resume)
    return tune_in(folder, made, workers=workers)


def _begun(
    config: str | Path | Mapping[str, Any] | ExperimentConfig | None,
    settings: Mapping[str, Any],
    request: TuningRequest,
    out: str | Path | None,
    resume: bool,
) -> tuple[Path, Plan]:
    """Return the folder of a tuning that is begun or goes on, and what is to be done there."""
    if resume:
        if out is None or config is not None or settings or request != TuningRequest():
            raise ConfigError(
                "resume=True goes on with the tuning in `out` as it was begun; give out and nothing beside workers"
            )
        return Path(out), plan_in(Path(out))
    chosen = load(config, settings, methods=COMPARED, may_import=True)
    check(chosen)
    made = plan(chosen, request)
    folder = default_folder(chosen) if out is None else Path(out)
    begin(folder, made)
    return folder, made
