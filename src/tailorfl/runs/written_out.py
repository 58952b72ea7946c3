"""An experiment with every option of its methods written out."""

from __future__ import annotations

from tailorfl.core.method import make_method
from tailorfl.settings.experiment import ExperimentConfig


def with_all_options(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with every option of its methods written out, so that its folder says what was run."""
    return config.model_copy(
        update={
            "methods": tuple(
                m.model_copy(update={"options": make_method(m.name, m.options).all_options()})
                for m in config.methods
            )
        }
    )
