"""Predictions of one deployed model for a file of new data, which is read like the run's own data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.columns import need_columns, numeric
from tailorfl.data.constants import Constants
from tailorfl.data.folder import SUFFIXES, load_image, stack_images
from tailorfl.data.instructions import files_of
from tailorfl.data.registry import load_source
from tailorfl.data.table_files import READING, SHOWN, read_table
from tailorfl.data.text import TEXTS, tokenized
from tailorfl.errors import ConfigError, DataError, ModelError, first_few
from tailorfl.export.folder import FACTS, check_steps, checked, loaded, network_of
from tailorfl.export.model_card import facts_of
from tailorfl.export.written_model import text_of
from tailorfl.interface import check_kind
from tailorfl.runs.files import write_text
from tailorfl.runs.folders import experiment_in
from tailorfl.runs.trained_models import GLOBAL, Deployed, Restored, restore

if TYPE_CHECKING:
    import pandas as pd  # at run time imported only to read tables: it takes 60 MB
    from torch import nn

log = logging.getLogger(__name__)

AT_ONCE = 256
"""Number of samples that go through the network together."""
DIGITS = 6
"""Digits of written numbers; float32 has seven."""
INSTRUCTIONS = "instructions"


def predict(
    folder: str | Path,
    data: str | Path | pd.DataFrame,
    *,
    client: str | int | None = None,
    method: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    source: Any = None,
    ids: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the predictions of a client's model for new data, one row for each sample, in the order of the data.

    Classes: `predicted`, and a column with the probability of each class. Labels: the probability of each. Regression:
    the predicted numbers. Counts: the expected counts. Survival: `risk`, a log hazard: the higher, the earlier the
    event.

    Args:
        folder: the folder of one exported model, or a result folder.
        data: a table of features or of texts (file or frame), a folder of images or one image, or JSON lines of
            instructions.
        client: the client whose model predicts, or "global" (with several architectures "global-ARCHITECTURE"); needed
            for a result folder.
        method, seed, steps, source: of a result folder only, as for `export`.
        ids: columns of a table that are copied next to the predictions; columns that were excluded from the training
            table are always copied.

    Raises:
        ConfigError: there is no such model.
        DataError: the data do not fit the model; says what is missing.
    """
    import pandas as pd

    check_kind("data", data, str, Path, pd.DataFrame)
    net, code, facts = _model(Path(folder), client, method, seed, steps, source)
    frame, raw = _read(data, facts, list(ids))
    ready = "preparation" in facts["inputs"]
    answers = []
    with torch.no_grad():
        for part in torch.split(raw, AT_ONCE):
            answers.append(code["answers"](net(part if ready else code["prepare"](part))).double())
    columns = _columns(torch.cat(answers).numpy(), facts["inputs"])
    if both := [name for name in columns if name in frame]:
        raise DataError(
            f"the table's column '{both[0]}' would be copied next to predictions of that name; rename it, or drop it"
        )
    return pd.concat([frame, columns], axis=1)


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    """Write predictions as CSV, numbers with `DIGITS` digits."""
    written = predictions.copy()
    for column in predictions.select_dtypes("float"):
        written[column] = predictions[column].map(f"{{:.{DIGITS}g}}".format)
    write_text(path, str(written.to_csv(index=False, lineterminator="\n")))


def _model(
    folder: Path,
    client: str | int | None,
    method: str | None,
    seed: int | None,
    steps: int | None,
    source: Any,
) -> tuple[nn.Module, Mapping[str, Callable[..., Any]], dict[str, Any]]:
    """Return the network, the functions that prepare inputs and convert outputs, and the model's facts."""
    if (folder / FACTS).is_file():
        facts = checked(folder)
        if client not in (None, facts["name"]):
            raise ConfigError(
                f"'{folder}' is the model of {facts['name']}, not of {client}; leave out --client"
            )
        chosen = {"method": method, "seed": seed, "steps": steps, "source": source}
        if asked := [n for n, given in chosen.items() if given is not None]:
            raise ConfigError(
                f"'{folder}' is one exported model, so {asked[0]} cannot be chosen; leave it out, or give "
                "the result folder"
            )
        module = loaded(folder)
        try:
            network, code = network_of(module), vars(module)
            if "answers" not in code:
                raise NameError("its model.py ends before answers()")
            return network, code, facts
        except Exception as error:  # damaged code without digests may raise anything
            raise ModelError(
                f"the exported model '{folder}' cannot be loaded ({type(error).__name__}: {error}); restore it from a "
                "copy, or export it again with tailorfl export"
            ) from error
    if client is None:
        experiment_in(folder)
        raise ConfigError(
            f"'{folder}' is a result folder with many models; choose one (--client NAME, or --client global), or give "
            "the folder of an exported model"
        )
    check_steps(steps)
    run = restore(folder, method, seed, source)
    model = _common(run, str(client)) or next(run.models([run.number(client)], steps))
    facts = facts_of(run, model)
    # The code of an export is reused, so that both do the same.
    code = {"__file__": str(folder / "model.py"), "__name__": "deployed"}
    exec(compile(text_of("", "", facts), "deployed", "exec"), code)
    return model.module, code, facts


def _common(run: Restored, name: str) -> Deployed | None:
    """Return the global model of this name; None if the name is a client's.

    Raises:
        ConfigError: there is none, or "global" stands for the models of several architectures.
    """
    if name != GLOBAL and (name in run.sim.federation.names or not name.startswith(f"{GLOBAL}-")):
        return None
    models = list(run.global_models())
    names = [model.name for model in models]
    if name not in names:
        raise ConfigError(f"'{name}' names no model of this run; its global models are {', '.join(names)}")
    return models[names.index(name)]


def _read(
    data: str | Path | pd.DataFrame, facts: Mapping[str, Any], ids: list[str]
) -> tuple[pd.DataFrame, Tensor]:
    """Return (columns that identify each sample, raw samples; prepared ones for a table with constants)."""
    import pandas as pd

    inputs, reading = facts["inputs"], facts["reading"]
    if TEXTS in inputs:
        return _text_table(data, inputs, ids)
    if isinstance(data, pd.DataFrame):
        return _table(data, inputs, ids)
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"'{path}' does not exist")
    if ids and inputs["type"] in ("image", "tokens"):
        raise ConfigError(f"ids ({', '.join(ids)}) are columns of a table, but the model reads other files")
    if inputs["type"] == "image":
        return _images(path, inputs, reading)
    if inputs["type"] == "tokens":
        return _texts(path, inputs, reading)
    return _table(path, inputs, ids)


def _table(
    data: Path | pd.DataFrame, inputs: Mapping[str, Any], ids: list[str]
) -> tuple[pd.DataFrame, Tensor]:
    reading = dict(inputs.get(READING, {}))
    kept_columns = list(dict.fromkeys([*ids, *reading.pop("exclude", ())]))
    constants = Constants.from_dict(inputs["preparation"], "model.json") if "preparation" in inputs else None
    features = list(inputs.get("features", ()) if constants is None else constants.columns)
    name, frame = read_table(
        data, **reading, exclude=[column for column in kept_columns if column not in features]
    )
    need_columns(name, frame, ids)
    size = int(np.prod(inputs["shape"]))
    columns_read = features or [column for column in frame.columns if column not in kept_columns]
    _check_columns(name, frame, columns_read, kept_columns, () if constants is None else constants.absent)
    if constants is None and len(columns_read) != size:
        raise DataError(
            f"the model reads {size} numbers per row, but table '{name}' has {len(columns_read)} columns"
        )
    rows = _rows_of(frame, kept_columns)
    if constants is not None:
        return rows, constants.inputs(frame, name)
    return rows, numeric(name, frame, columns_read).reshape(-1, *inputs["shape"])


def _text_table(
    data: str | Path | pd.DataFrame, inputs: Mapping[str, Any], ids: list[str]
) -> tuple[pd.DataFrame, Tensor]:
    reading = inputs[TEXTS]
    columns_read = [reading[key] for key in ("text", "second") if reading.get(key) is not None]
    name, frame = read_table(data, **inputs.get(READING, {}), exclude=[*columns_read, *ids])
    need_columns(name, frame, ids)
    _check_columns(name, frame, columns_read, ids)
    return _rows_of(frame, ids), tokenized(name, frame, reading, inputs["tokenizer"])


def _rows_of(frame: pd.DataFrame, kept_columns: Sequence[str]) -> pd.DataFrame:
    """Return each row's number, unless the table has its own, and the unchanged cells in the kept columns."""
    rows = frame[[c for c in kept_columns if c in frame.columns]].astype(object)
    if "row" not in rows:
        rows.insert(0, "row", range(len(frame)))
    return rows


def _check_columns(
    name: str,
    frame: pd.DataFrame,
    columns_read: Sequence[str],
    kept_columns: Sequence[str],
    absent: Sequence[str] = (),
) -> None:
    """Raise DataError if a table lacks rows, or columns that are not `absent`; warn of columns that are not read."""
    columns = [str(column) for column in frame.columns]
    missing = [column for column in columns_read if column not in columns]
    if lacking := [column for column in missing if column not in absent]:
        raise DataError(
            f"table '{name}' lacks {first_few(lacking, SHOWN)}, which the model reads; it has: "
            f"{first_few(columns, SHOWN)}"
        )
    if missing:
        log.warning("table '%s' lacks %s, as the client did in training", name, first_few(missing, SHOWN))
    if extra := [column for column in columns if column not in columns_read and column not in kept_columns]:
        log.warning("table '%s': the model ignores the columns %s", name, first_few(extra, SHOWN))
    if not len(frame):
        raise DataError(f"table '{name}' has no rows")


def _images(path: Path, inputs: Mapping[str, Any], reading: Mapping[str, Any]) -> tuple[pd.DataFrame, Tensor]:
    import pandas as pd

    images = (f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    files = [path] if path.is_file() else sorted(images)
    if not files:
        raise DataError(f"'{path}' holds no images ({', '.join(SUFFIXES)})")
    size = reading["options"].get("size")
    names = [str(file) for file in files]
    x = stack_images((load_image(file, None if size is None else tuple(size)) for file in files), names)
    channels, height, width = inputs["shape"]
    if x.shape[1] == 1 and channels == 3:
        x = x.expand(-1, 3, -1, -1).contiguous()
    if tuple(x.shape[1:]) != (channels, height, width):
        kind = {1: "grey", 3: "colour"}
        raise DataError(
            f"the model reads {kind.get(channels, channels)} images of {height} x {width} pixels; '{path}' has "
            f"{kind[x.shape[1]]} ones of {x.shape[2]} x {x.shape[3]}; convert them first"
        )
    names_shown = [str(file.relative_to(path)) if file != path else file.name for file in files]
    return pd.DataFrame({"file": names_shown}), x


def _texts(path: Path, inputs: Mapping[str, Any], reading: Mapping[str, Any]) -> tuple[pd.DataFrame, Tensor]:
    import pandas as pd

    options = {key: value for key, value in reading["options"].items() if key not in ("path", "samples")}
    if reading["data"] != INSTRUCTIONS or inputs["task"] == "generation":
        raise DataError(
            "texts are read only for models of texts with a label, and of instructions with options "
            "(data=instructions, form choice); for other models make token ids yourself and call the exported model"
        )
    files = files_of(path)
    source = load_source(INSTRUCTIONS, path=str(path), **options)
    order = pd.DataFrame({"row": range(len(source))})
    if len(files) > 1:
        order.insert(0, "file", [source.group_names["client"][int(k)] for k in source.groups["client"]])
    return order, source.x


def _columns(answers: Any, inputs: Mapping[str, Any]) -> pd.DataFrame:
    """Return answers [samples, ...] as named columns."""
    import pandas as pd

    task, names = inputs["task"], [str(name) for name in inputs.get("classes", ())]
    count = answers.shape[1]
    if task in ("classification", "binary"):
        names = names if len(names) == count else _numbers(count)
        predictions = pd.DataFrame(answers, columns=[f"p({name})" for name in names])
        predictions.insert(0, "predicted", [names[k] for k in answers.argmax(1)])
        return predictions
    if task == "survival":
        return pd.DataFrame({"risk": answers[:, 0]})
    title = "p" if task == "multilabel" else "predicted"
    return pd.DataFrame(
        answers, columns=[title] if count == 1 else [f"{title}({k})" for k in _numbers(count)]
    )


def _numbers(count: int) -> list[str]:
    return [str(k) for k in range(count)]
