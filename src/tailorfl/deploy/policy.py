"""A client's limits on what any experiment of a server may ask; `tailorfl deploy policy` writes them.

Every check is made at the client, before samples are read or anything is allocated by a number from the server. Its
messages name settings, and never contents of samples.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field, ValidationError

from tailorfl.core.method import find_method
from tailorfl.data.hub_sets import HUB_SETS
from tailorfl.data.source import Source
from tailorfl.data.summaries import CLASSES
from tailorfl.errors import ConfigError, MessageError, PolicyError
from tailorfl.models.registry import build
from tailorfl.privacy import Uses
from tailorfl.runs.build import with_all_options
from tailorfl.runs.files import encode, reporting
from tailorfl.runs.fingerprint import HARMLESS, changes
from tailorfl.settings.base import Names, Number, Settings, Whole, listed
from tailorfl.settings.execution import EngineConfig
from tailorfl.settings.experiment import DEFAULT, ExperimentConfig

UNREAD = ("name", "description", "published", "search", "variants", "scales", "scale", "track", "system", "engine",
          "deploy")  # fmt: skip
"""Settings whose strings a client never opens as files."""
_OWN = re.compile(
    r"data\.(path|options\.(label|features|words|exclude|na_values|sep|decimal|text|client|split|constants)(\..+)?)"
)
"""Settings that, for a client's own file, name columns, words, separators, or a file of the server."""
_EMPTY = re.compile(r"data\.options\.na_values(\..+)?")
"""Words or numbers of empty cells, which are no sizes in any table."""
_LABEL = re.compile(r"methods\.\d+\.label")
_PLACE = re.compile(r"[/\\:]|^[~.]|\.[A-Za-z][A-Za-z0-9]{1,11}$")
"""A path, `module:object`, `timm:NAME`, or a name with a file extension."""
_REGISTERED = re.compile(r"(data|model(\.larger\.\d+)?|methods\.\d+)\.name")
"""Names that are looked up in a registry and never opened as a file."""
_FETCHED = re.compile(r".*\.(checkpoint|tokenizer)")
"""Settings that name something of a hub, also by a word without a slash."""
_BUILT_IN = ("byte", "minilm")
"""Tokenizers that come with the library."""
Count = Annotated[Whole, Field(ge=1)]


class Policy(Settings):
    """The limits of a client; the defaults are for a client without a policy file."""

    methods: Names | None = Field(default=None, description="methods that may train; null: any")
    models: Names | None = Field(default=None, description="models that may be trained; null: any")
    columns: Names | None = Field(
        default=None, description="columns of the table that may be read, as feature or label; null: all"
    )
    files: Names = Field(
        default=(),
        description="files, folders, hub models and module:object that an experiment may name; no other is opened",
    )
    min_rows: Count = Field(default=10, description="smallest number of training rows for a summary")
    min_count: Count = Field(
        default=5, description="smallest number of rows for a word, a class or a filled cell to be reported"
    )
    max_levels: Count = Field(
        default=100, description="largest number of words of a column, and of classes, to report"
    )
    min_noise: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="smallest noise allowed in train.dp, which must then be of level sample; null: train.dp is not "
        "required",
    )
    secret_noise: bool = Field(
        default=True,
        description="whether private training on the client's own file draws batches and noise from a secret of this "
        "client; false: from the experiment's seed, as in a simulation, so anybody who knows it can remove the noise",
    )
    max_epsilon: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="largest epsilon of all experiments in this state folder together; requires train.dp of level "
        "sample; null: no bound",
    )
    delta: Annotated[Number, Field(gt=0, lt=1)] = Field(default=1e-5, description="of epsilon")
    metrics: bool = Field(
        default=True, description="whether losses and metrics may leave, although no noise protects them"
    )
    min_clients: Count = Field(default=1, description="fewest clients of a federation, as the server says")
    max_clients: Count = Field(default=10_000, description="most clients of a federation")
    max_rows: Count = Field(default=10_000_000, description="most rows of all clients together")
    max_rounds: Count = Field(default=10_000, description="most rounds of a method")
    max_jobs: Count = Field(default=100, description="most methods times seeds of an experiment")
    max_seeds: Count = Field(
        default=10,
        description="most seeds of an experiment; each has a new split of the rows and its own summary",
    )
    max_steps: Count = Field(default=100_000, description="largest whole number in settings of training")
    max_numbers: Count = Field(
        default=250_000_000, description="most numbers of a model, or of data generated here"
    )
    max_bytes: Annotated[Whole, Field(ge=1024)] = Field(default=2**30, description="largest message")
    max_disk: Count = Field(default=20 * 2**30, description="most bytes of the state folder")

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Return the policy of a YAML file. Raises ConfigError if it cannot be read."""
        try:
            with reporting(path, "read"):
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            return cls.model_validate(content or {})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"policy '{path}': {key} = {str(first['input'])[:80]!r}: {first['msg']}"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"policy '{path}' is not YAML: {error}") from error

    @property
    def needs_noise(self) -> bool:
        """Whether the policy requires private training."""
        return self.min_noise is not None or self.max_epsilon is not None

    # -- the experiment -------------------------------------------------------------------------------------

    def admitted(self, config: ExperimentConfig, *, own_file: bool) -> ExperimentConfig:
        """Return the part of a server's experiment that a client uses.

        Raises:
            MessageError: the policy does not allow the experiment; names the setting.
        """
        models = [model for line in config.methods for model in config.model_of(line).architectures.values()]
        _check_names("method", [line.name for line in config.methods], self.methods)
        _check_names("model", [model.name for model in models], self.models)
        for line in config.methods:
            find_method(line.name)  # a module's code runs only if this client has named it (--import)
            private = {**config.train.model_dump(), **line.train}["dp"]
            if self.needs_noise and (private is None or dict(private).get("level", "sample") != "sample"):
                raise MessageError(
                    f"this client trains only with noise, but '{line.label[:80]}' has no train.dp of level sample"
                )
        self._bounded("rounds", max(line.rounds or config.rounds for line in config.methods), "max_rounds")
        self._bounded("seeds", len(config.seeds), "max_seeds")
        self._bounded("methods x seeds", len(config.methods) * len(config.seeds), "max_jobs")
        training = [config.train.model_dump(), *({**line.train, **line.options} for line in config.methods)]
        self._bounded("numbers of train", max(_whole_numbers(training), default=0), "max_steps")
        made_here = {"public_samples", "options"} | (set() if own_file else {"clients", "samples"})
        settings = _leaves({"data": config.data.model_dump(include=made_here)})
        no_size = _OWN if own_file else _EMPTY
        sizes = {key: value for key, value in settings if not no_size.fullmatch(key)}
        size = math.prod(n for n in _whole_numbers(sizes) if n > 1)
        self._bounded("numbers of data", size, "max_numbers")
        for key, value in _texts(config.to_dict(), own_file):
            if not self._is_allowed(key, value):
                raise MessageError(
                    f"this client does not open files that a server names, but {key} is '{value[:80]}'; to allow it, "
                    "list it under files of the client's policy"
                )
        simple = EngineConfig(name="sequential", precision=config.engine.precision)
        return config.model_copy(update={"engine": simple, "system": DEFAULT.system, "track": DEFAULT.track})

    def _is_allowed(self, key: str, text: str) -> bool:
        is_fetched = (
            text in HUB_SETS
            if key in ("data.name", "data.public")
            else text not in _BUILT_IN and bool(_FETCHED.fullmatch(key))
        )
        if (
            not is_fetched
            and not _PLACE.search(text)
            and (_REGISTERED.fullmatch(key) or not os.path.exists(text))
        ):
            return True
        if text in self.files:
            return True
        path, *allowed = (Path(os.path.realpath(os.path.expanduser(name))) for name in (text, *self.files))
        return any(path.is_relative_to(parent) for parent in allowed if parent.exists())

    def check_model(self, config: ExperimentConfig, label: str, facts: Mapping[str, Any]) -> None:
        """Check the size of samples and models before they are made. Raises MessageError if they are too large."""
        try:
            sizes = [math.prod(map(abs, facts[key][0])) for key in ("x", "y")] + [abs(int(facts["outputs"]))]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MessageError(
                f"the server's description of the samples cannot be read: {error!r}"[:300]
            ) from error
        self._bounded("numbers of a sample", max(sizes), "max_numbers")
        line = next(method for method in config.methods if method.label == label)
        for model in config.model_of(line).architectures.values():
            self._bounded("numbers of model", max(_whole_numbers(model.options), default=0), "max_numbers")
            texts = [model.name, *(text for _, text in _texts(model.options, own_file=False))]
            if any(map(_PLACE.search, texts)):
                continue  # the operator has listed it, and its code may not support the meta device
            with torch.device("meta"):  # tensors have shapes but no memory there
                module = build(model.name, tuple(facts["x"][0]), int(facts["outputs"]), **model.options)
            self._bounded("numbers of model", sum(p.numel() for p in module.parameters()), "max_numbers")

    # -- the federation -------------------------------------------------------------------------------------

    def check_federation(self, names: Any, *counts: Any) -> None:
        """Check the server's numbers of clients and rows. Raises MessageError if they are out of bounds."""
        if not isinstance(names, Sequence) or len(set(map(str, names))) != len(names):
            raise MessageError("the server does not list the federation's clients, each once")
        if len(names) < self.min_clients:
            raise MessageError(
                f"the federation has {len(names)} clients; the policy of this client has min_clients: "
                f"{self.min_clients}"
            )
        self._bounded("clients", len(names), "max_clients")
        for rows in counts:
            are_counts = isinstance(rows, Sequence) and all(type(n) is int and n >= 0 for n in rows)
            if not are_counts or len(rows) != len(names):
                raise MessageError("the server does not say how many rows each client has")
        self._bounded("rows", sum(sum(rows) for rows in counts), "max_rows")

    # -- samples and summaries ------------------------------------------------------------------------------

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise PolicyError if a column may not be read."""
        if self.columns is not None and (unlisted := sorted({*columns} - {*self.columns})):
            raise PolicyError(
                f"the policy does not list the columns {', '.join(unlisted)[:300]}; list them under columns, or name "
                "only allowed columns in data.options.features of the experiment"
            )

    def check_summary(self, source: Source, train_rows: int) -> None:
        """Raise PolicyError if a summary would be of too few rows, or name a class of too few rows."""
        if train_rows < self.min_rows:
            raise PolicyError(
                f"a summary would cover {train_rows} training rows; min_rows is {self.min_rows}"
            )
        if source.task in CLASSES:
            counts = torch.bincount(source.y.flatten().long())
            counts = counts[counts > 0]
            if len(counts) > self.max_levels:
                raise PolicyError(f"the label has {len(counts)} classes; max_levels is {self.max_levels}")
            if int(counts.min()) < self.min_count:
                raise PolicyError(
                    f"the label has a class with {int(counts.min())} rows, which would be reported; min_count is "
                    f"{self.min_count}"
                )

    # -- privacy --------------------------------------------------------------------------------------------

    def check_noise(self, uses: Uses, epsilon: float | None) -> None:
        """Raise PolicyError if training would have too little noise, or cost more than the remaining ε."""
        if self.needs_noise and not uses:
            raise PolicyError("training would use no noise")
        if self.min_noise is not None and (noise := min(use.noise for use in uses)) < self.min_noise:
            raise PolicyError(f"the noise would be {noise:g}; min_noise is {self.min_noise:g}")
        if self.max_epsilon is not None:
            if epsilon is None:
                raise PolicyError("max_epsilon needs the accountant: pip install opacus")
            if not epsilon <= self.max_epsilon:
                raise PolicyError(
                    f"the epsilon of everything that has left would be {epsilon:.4g}; max_epsilon is "
                    f"{self.max_epsilon:g}"
                )

    def _bounded(self, what: str, value: int, key: str) -> None:
        """Raise MessageError if the server asks for more than the setting `key` of the policy allows."""
        most = getattr(self, key)
        if value > most:
            asked = min(value, 10**18)  # a longer number may be too long for a text
            raise MessageError(
                f"the server asks for {asked} {what}; the policy of this client has {key}: {most}"
            )


@dataclass(frozen=True)
class Consent:
    """The experiments that the operator of a client has agreed to.

    Attributes:
        experiment: the one in the operator's own file.
        accepted: digests given by the operator.
    """

    experiment: ExperimentConfig | None = None
    accepted: frozenset[str] = frozenset()

    def check(self, config: ExperimentConfig) -> str:
        """Return the digest of an experiment. Raises MessageError if the operator has not agreed to it."""
        digest = experiment_digest(config)
        if self.experiment is not None and experiment_digest(self.experiment) != digest:
            differ = list(changes(agreed(self.experiment), agreed(config)))
            raise MessageError(
                f"the server's experiment is not the one that this client has (--experiment): {'; '.join(differ)}"[
                    :400
                ]
            )
        if self.experiment is None and digest not in self.accepted:
            raise MessageError(
                f"the operator of this client has not accepted the experiment yet; accept it with --accept {digest}"
            )
        return digest


DEFAULT_POLICY = Policy()
NO_CONSENT = Consent()


def agreed(config: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that an operator agrees to: the name, and all that affect training and messages."""
    harmless = {*HARMLESS} - {"name", "seeds", "methods"}
    settings = {
        key: value for key, value in with_all_options(config).to_dict().items() if key not in harmless
    }
    data = {key: value for key, value in settings["data"].items() if key != "path"}
    return {**settings, "data": data, "precision": config.engine.precision}


def experiment_digest(config: ExperimentConfig) -> str:
    """Return the digest by which an operator accepts an experiment."""
    plain = json.dumps(
        json.loads(encode(agreed(config))), sort_keys=True
    )  # independent of the order in a file
    return hashlib.sha256(plain.encode()).hexdigest()[:32]


def described(config: ExperimentConfig) -> str:
    """Return a description of the experiment for the operator who decides whether to join."""
    lines = [f"the server asks to join '{config.name[:80]}':"]
    for line in config.methods:
        dp = {**config.train.model_dump(), **line.train}["dp"]
        private = "no noise: replies may reveal single rows" if dp is None else f"noise: {dict(dp)}"
        rounds = f"{line.rounds or config.rounds} rounds"
        if config.budget != "rounds" and line.rounds is None:
            rounds = f"as many rounds as cost the {config.budget} of {config.rounds} rounds of FedAvg"
        lines.append(
            f"  {line.label[:80]} ({line.name[:80]}), {rounds} for each of {len(config.seeds)} seeds; {private}"
        )
    options = config.data.options
    features = options.get("features") or "all other columns of your file"
    lines += [
        f"  model: {str(config.model.model_dump())[:300]}",
        f"  data: {config.data.name[:80]}; label: {str(options.get('label', '-'))[:200]}",
        f"  features: {str(features)[:300]}",
        "  sent before training: numbers of rows, names of columns and classes"
        + ("" if config.data.normalise == "none" else ", sums of numbers and the words of columns"),
        f"  sent in every round: the method's reply, losses and metrics; clients: {config.deploy.clients or '?'}",
    ]
    return "\n".join(lines)


def template(config: ExperimentConfig | None = None) -> str:
    """Return a policy file with every key explained, for one experiment or for any."""
    values: dict[str, Any] = {"min_clients": 2}
    if config is not None:
        models = {m.name for line in config.methods for m in config.model_of(line).architectures.values()}
        seeds = len(config.seeds)
        for key, needed in (("max_seeds", seeds), ("max_jobs", len(config.methods) * seeds)):
            values[key] = max(needed, Policy.model_fields[key].default)
        values["methods"] = sorted({line.name for line in config.methods})
        values["models"] = sorted(models)
        if config.budget == "rounds":  # another budget pays a cheap method for more rounds than these
            values["max_rounds"] = max(line.rounds or config.rounds for line in config.methods)
        label, features = config.data.options.get("label"), config.data.options.get("features")
        if label and features:
            values["columns"] = [*listed(label), *listed(features)]
    lines = ["# What this client allows: tailorfl client ... --policy THIS-FILE", ""]
    for key, field in Policy.model_fields.items():
        value = values.get(key, list(field.default) if isinstance(field.default, tuple) else field.default)
        text = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
        lines += [f"# {field.description}", f"{key}: {text}"]
    return "\n".join(lines) + "\n"


def _check_names(what: str, names: Sequence[str], allowed: Sequence[str] | None) -> None:
    for name in names:
        if allowed is not None and name not in allowed:
            raise MessageError(
                f"this client does not allow the {what} '{name[:80]}', only {', '.join(allowed)}"
            )


def _texts(value: Any, own_file: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the settings that are strings, except those that a client never reads as a path."""
    for key, leaf in _leaves(value):
        is_unread = (
            key.partition(".")[0] in UNREAD or _LABEL.fullmatch(key) or (own_file and _OWN.fullmatch(key))
        )
        if isinstance(leaf, str) and not is_unread:
            yield key, leaf


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield the absolute values of the numbers in settings, except seeds, rounded down."""
    for key, leaf in _leaves(value):
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and "seed" not in key:
            yield int(abs(leaf)) if math.isfinite(leaf) else 0


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all leaves of a nested value."""
    if isinstance(value, Mapping | list | tuple):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
