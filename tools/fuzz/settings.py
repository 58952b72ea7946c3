"""Random settings: keys and values as people mistype them and as somebody would who means harm."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from tailorfl.errors import TailorflError
from tailorfl.printable import harmful
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.settings.loading import load

BASE: dict[str, Any] = {
    "method": "fedavg",
    "model": "logistic",
    "data": {"clients": 3, "samples": 60},
    "seeds": 1,
    "rounds": 1,
    "train": {"steps": 1},
    "eval": {"every": 0, "sets": ["local"], "final": ["local"]},
}
KEYS = [
    "name", "description", "seeds", "data", "data.name", "data.path", "data.options", "data.samples",
    "data.partition",
    "data.partition_options", "data.partition_options.alpha", "data.clients", "data.split", "data.split.train",
    "data.split.test", "data.heldout_clients", "data.heldout_domain", "data.public", "data.public_samples",
    "data.official_set", "data.normalise", "data.augment", "data.seed", "model", "model.name", "model.hidden",
    "model.trainable", "model.options", "model.norm", "model.dropout", "model.activation", "method", "methods",
    "method.name", "method.label", "method.lam", "method.rounds", "method.train", "method.train.lr", "method.model",
    "train.epochs", "train.steps", "train.batch_size", "train.lr", "train.optimizer", "train.schedule",
    "train.class_weights",
    "train.round_schedule", "train.momentum", "train.weight_decay", "train.clip", "train.dp", "train.dp.clip",
    "rounds",
    "budget", "fraction", "sampling", "weights", "engine", "engine.name", "engine.chunk", "engine.states",
    "engine.device", "eval.every", "eval.sets", "eval.final", "eval.max_samples", "eval.adapt_steps", "eval.select",
    "eval.metric", "eval.metrics", "eval.calibrate", "eval.predictions",
    "eval.target", "eval.sharpness", "eval.feature_distance", "eval.generation", "checkpoint_every", "threads",
    "variants", "published", "",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 0.5, 1e-9, 1e-300, 1e9, 1e15, 1e38, 1e39, 1e308, 10**18, 2**63, 10**30, -(10**30), -0.0, 1e400,
    float("nan"), float("-inf"), True, False, None,
]  # fmt: skip
TEXTS = [
    "", " ", "x", "digits", "ditto", "local", "fedavg", "logistic", "mlp", "cnn2", "auto", "cpu", "cuda", "uniform",
    "bernoulli", "val", "local_average", "dirichlet", "iid", "..", "../..", "/", "a/b", "a.b", "[/x]", "$x_{",
    "|", "é",
    "日本",
    "\x1b[31m", "a\nb", "\x00", "\u202e", "x" * 300, "x" * 20_000, "%s{}", "1e3", "null", "none", "os:system", ":",
    "shutil:rmtree", "<script>", "*", "-1", "1:30", "0x1f", "2001-01-01",
]  # fmt: skip
YAML = [
    "&a [*a]", "[" * 60 + "]" * 60, "{a: " * 60 + "1" + "}" * 60, "!!python/object:os.system x", "!!binary x",
    "? [a]",
    "[1, 2", "{a: 1, a: 2}", "*b", "!!int ''", "2001-99-99", "9" * 5000, "0x" + "f" * 5000, "!!set {a}",
    "<<: [1]", "%TAG",
    "\t- a", "- - - -", "!!float x", "!!timestamp x", "!!omap [a]", "!!pairs [a: 1]", "'", "@", "`", ">-\n a", "|",
]  # fmt: skip


def value(random_: random.Random, depth: int = 0) -> Any:
    """Return a value of some kind."""
    kind = random_.random()
    if kind < 0.4:
        return random_.choice(NUMBERS)
    if kind < 0.75 or depth > 3:
        return random_.choice(TEXTS)
    many = random_.randrange(4)
    if kind < 0.87:
        return [value(random_, depth + 1) for _ in range(many)]
    keys = [random_.choice([*TEXTS, *(key.split(".")[-1] for key in KEYS)]) for _ in range(many)]
    return {key: value(random_, depth + 1) for key in keys}


def override(random_: random.Random) -> str:
    """Return a `key=value` as from a command line."""
    key = random_.choice(KEYS)
    if random_.random() < 0.15 and key:
        place = random_.randrange(len(key))
        key = key[:place] + random_.choice(["", "x", ".", key[place] * 2]) + key[place + 1 :]
    kind = random_.random()
    if kind < 0.2:
        return f"{key}={random_.choice(YAML)}"
    if kind < 0.3:
        return random_.choice([key, f"={key}", f"{key}==", f"{key} = 1", f"--{key}"])
    made = value(random_)
    plain = made if isinstance(made, str) else yaml.safe_dump(made, default_flow_style=True).strip()
    return f"{key}={plain}"


def case(random_: random.Random, folder: Path) -> None:
    """Read settings, and run what is small enough to be run.

    Raises:
        TailorflError: as it should.
        AssertionError: what was read is not what is written back, or a result would be shown raw.
    """
    if random_.random() < 0.15:
        config = load(_as_file(random_, folder))
    elif random_.random() < 0.5:
        config = load(BASE, [override(random_) for _ in range(random_.randrange(1, 4))])
    else:
        given = {random_.choice(KEYS).split(".")[0]: value(random_) for _ in range(random_.randrange(1, 4))}
        config = load({**BASE, **given} if random_.random() < 0.8 else given)
    again = load(yaml.safe_load(config.to_yaml()))
    assert again.to_yaml() == config.to_yaml(), "settings read back are others"
    texts = [config.name, *(method.label for method in config.methods)]
    assert not any(harmful(text) for text in texts), "a text that changes the terminal"
    check(config)
    if _small(config):
        result = run_experiment(config, folder / "out")
        assert len(result.table) == len(config.methods)
        assert harmful(result.markdown, but="\n") is None


def _as_file(random_: random.Random, folder: Path) -> Path:
    """A file of settings with some of its characters changed."""
    text = list(yaml.safe_dump({**BASE, "name": "x", "variants": {"a": {"rounds": 2}}}, sort_keys=False))
    for _ in range(random_.randrange(1, 6)):
        place = random_.randrange(len(text))
        text[place] = random_.choice([*"{}[]:,&*!|>'\"%@`#-?\t\n \x00é9", "", "&a ", "*a", "<<: *a"])
    file = folder / "settings.yaml"
    file.write_text("".join(text), encoding="utf-8")
    return file


def _small(config: Any) -> bool:
    """Whether running it takes a moment and no network, whatever the numbers say."""
    data, train, engine = config.data, config.train, config.engine
    return (
        not config.variants
        and data.name == "digits"
        and data.public is None
        and data.corruptions is None
        and (data.samples or 1797) <= 1797
        and (data.clients or 20) <= 100
        and len(config.seeds) * len(config.methods) <= 3
        and config.budget == "rounds"
        and max([config.rounds, *(method.rounds or 1 for method in config.methods)]) <= 3
        and all(method.name in ("local", "fedavg", "ditto", "local_average") for method in config.methods)
        and not any(method.model for method in config.methods)
        and all(
            isinstance(option, bool | str | None) or (isinstance(option, int | float) and abs(option) < 10)
            for method in config.methods
            for option in method.options.values()
        )
        and all(
            t.dp is None and (t.steps or 1) <= 10 and (t.epochs or 1) <= 3
            for t in (train, *_overrides(config))
        )
        and config.model.name in ("logistic", "mlp")
        and all(isinstance(size, int) and size <= 64 for size in _sizes(config))
        and engine.device == "cpu"
        and not engine.workers
        and engine.cluster is None
        and config.eval.sharpness in (None, 0, False)
        and max([0, *config.eval.adapt_steps]) <= 5
    )


def _overrides(config: Any) -> list[Any]:
    return [method.train for method in config.methods]


def _sizes(config: Any) -> list[Any]:
    hidden = config.model.options.get("hidden", [])
    return list(hidden) if isinstance(hidden, list | tuple) else []


RULE = TailorflError
