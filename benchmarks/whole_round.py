"""What a round costs beyond its training: evaluation, records, checkpoints and the progress display.

100 clients with 60 training, 10 validation and 20 test samples of 28x28 each, batch 10, one epoch, through
`run_experiment` with evaluation every 5 rounds (on val and local, a checkpoint when it is cheap, the final sets at the
end) and again with an evaluation after every round. Process seconds of one thread:

- `round_seconds`: a whole round of the runner, the mean over all rounds but the last;
- `training_seconds`: the median of `Simulation.step` in that run; `alone_seconds`: of a simulation that only steps, in
  alternation with it. The first step, which also chooses the engine, counts as a median one;
- `ratio`: the first over the second, `ratio_to_alone`: the first over the third; the median over repetitions;
- `parts`: where the rest of a round goes; `end_seconds`: the last evaluation (on the union of all test parts too), the
  summary and the parquet files, once a run;
- `waiting_seconds`: what a round waits for the disk, which process time does not see.

    python benchmarks/whole_round.py --json benchmarks/results/whole_round.json
    python benchmarks/whole_round.py --models cnn2 --repeat 1 --json benchmarks/results/whole_round.json   # these alone
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tailorfl.benchmark.clock import processor
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.report.progress import ProgressLines
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import job_loop, runner
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.runs.job_loop import SIMULATED
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

CLIENTS, TRAIN, VAL, TEST, BATCH = 100, 60, 10, 20, 10
MODELS: dict[str, dict[str, Any]] = {
    "logistic": {"name": "logistic"},
    "mlp": {"name": "mlp", "options": {"hidden": [200]}},
    "cnn2": {"name": "cnn2"},
}
ROUNDS = {"logistic": 21, "mlp": 21, "cnn2": 6}
"""One more than a multiple of 5, so that the rounds before the last have their share of evaluations."""
METHODS = ("fedavg", "ditto")
PARTS: dict[str, tuple[Any, str]] = {
    "training": (Simulation, "step"),
    "means": (job_loop, "means"),
    "clients": (RunStore, "append_clients"),
    "rounds": (RunStore, "append_round"),
    "dump": (Simulation, "dump"),
    "checkpoint": (RunStore, "save_checkpoint"),
    "summary": (job_loop, "summary_of"),
    "finish": (RunStore, "finish"),
}
"""What is timed beside evaluations, by the name of its line in the results."""


class Watch(ProgressLines):
    """The display of the command line, which also notes what was spent where, and when each round was done."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.spent: dict[str, list[float]] = {name: [] for name in (*PARTS, "evaluation")}
        self.seconds: list[tuple[float, float]] = []
        self.begin = (0.0, 0.0)
        self.at_last: dict[str, int] = {}

    def job_started(self, *arguments: Any) -> None:
        """Start the clock."""
        super().job_started(*arguments)
        self.begin = _now()

    def round_done(self, job: Job, done: Any) -> None:
        """Stop the clock of a round."""
        super().round_done(job, done)
        self.seconds.append(_now())
        if len(self.seconds) == job.rounds - 1:
            self.at_last = {name: len(found) for name, found in self.spent.items()}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which notes its process seconds."""

        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.spent[name].append(time.process_time() - begin)

        return run


def source() -> Source:
    """Random images of 100 clients."""
    generator = torch.Generator().manual_seed(0)
    total = CLIENTS * (TRAIN + VAL + TEST)
    return from_tensors(
        torch.randn(total, 1, 28, 28, generator=generator),
        torch.randint(0, 10, (total,), generator=generator),
        torch.arange(total) % CLIENTS,
    )


def experiment(model: str, method: str, every: int) -> ExperimentConfig:
    """The experiment with the library's default settings but for the rounds between evaluations."""
    whole = TRAIN + VAL + TEST
    settings: dict[str, Any] = {
        "seeds": 1,
        "methods": method,
        "model": MODELS[model],
        "rounds": ROUNDS[model],
        "train": {"batch_size": BATCH},
        "data": {"split": {"train": TRAIN / whole, "val": VAL / whole, "test": TEST / whole}},
    }
    return ExperimentConfig.model_validate({**settings, "eval": {"every": every}})


def whole(config: ExperimentConfig, data: Source) -> dict[str, Any]:
    """One run: seconds of a round, of its training, and of what else."""
    watch = Watch()
    real = {name: getattr(owner, function) for name, (owner, function) in PARTS.items()}
    for name, (owner, function) in PARTS.items():
        setattr(owner, function, watch.timed(name, real[name]))
    backend = replace(SIMULATED, evaluate=watch.timed("evaluation", SIMULATED.evaluate))
    try:
        with tempfile.TemporaryDirectory() as folder:
            runner.run_experiment(config, Path(folder) / "run", observer=watch, source=data, backend=backend)
    finally:
        for name, (owner, function) in PARTS.items():
            setattr(owner, function, real[name])
    rounds = len(watch.seconds) - 1
    steps = watch.spent["training"]
    step = statistics.median(steps[1:])
    process, wall = (watch.seconds[-2][k] - watch.begin[k] for k in (0, 1))
    spent = {name: sum(found[: watch.at_last[name]]) / rounds for name, found in watch.spent.items()}
    last = {name: sum(found[watch.at_last[name] :]) for name, found in watch.spent.items()}
    trained = spent.pop("training")
    parts = {name: seconds for name, seconds in spent.items() if watch.at_last[name]}
    found = process / rounds - trained
    return {
        "round_seconds": found + step,
        "training_seconds": step,
        "ratio": (found + step) / step,
        "parts": {**parts, "rest": found - sum(parts.values())},
        "end_seconds": sum(last.values()) - last["training"],
        "end_evaluation_seconds": last["evaluation"],
        "waiting_seconds": (wall - process) / rounds,
        "checkpoints": watch.at_last["checkpoint"],
    }


def alone(config: ExperimentConfig, data: Source, steps: int = 5) -> float:
    """Median seconds of a round that is only trained."""
    job = Job(config, config.methods[0], 0)
    sim = make_simulation(job, make_federation(config, 0, data, set()))
    sim.step()
    seconds = []
    for _ in range(steps):
        begin = time.process_time()
        sim.step()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def measure(model: str, method: str, every: int, repeat: int, data: Source) -> dict[str, Any]:
    """One line of the results: the median of the ratios, and the run with the cheapest round."""
    config = experiment(model, method, every)
    runs = []
    for _ in range(repeat):
        single = alone(config, data, 2 if model == "cnn2" else 7)
        found = whole(config, data)
        runs.append({**found, "alone_seconds": single, "ratio_to_alone": found["round_seconds"] / single})
    best = min(runs, key=lambda run: run["round_seconds"])
    ratios = {name: statistics.median(run[name] for run in runs) for name in ("ratio", "ratio_to_alone")}
    return {"model": model, "method": method, "every": every, **best, **ratios}


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def kept(file: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a file of results that were not measured again."""
    again = {(line["model"], line["method"], line["every"]) for line in lines}
    old = json.loads(file.read_text())["lines"] if file.exists() else []
    return [line for line in old if (line["model"], line["method"], line["every"]) not in again]


def main() -> None:
    """Measure and print one line a model, method and interval of evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, lines = source(), []
    for model in arguments.models:
        for method in arguments.methods:
            for every in (5, 1):
                found = measure(model, method, every, arguments.repeat, data)
                line = {**found, "repeat": arguments.repeat}
                lines.append(line)
                parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in line["parts"].items())
                print(
                    f"{model:9s} {method:7s} every {line['every']}: {line['ratio']:.3f} x "
                    f"({line['ratio_to_alone']:.3f} x alone), round {1e3 * line['round_seconds']:.1f} ms of which "
                    f"training {1e3 * line['training_seconds']:.1f}; {parts}; waits "
                    f"{1e3 * line['waiting_seconds']:.2f}; end {1e3 * line['end_seconds']:.0f} (evaluation "
                    f"{1e3 * line['end_evaluation_seconds']:.0f})",
                    flush=True,
                )
    if arguments.json:
        results = {
            "machine": processor(),
            "torch": torch.__version__,
            "clients": CLIENTS,
            "samples": {"train": TRAIN, "val": VAL, "test": TEST},
            "batch": BATCH,
            "lines": [*kept(arguments.json, lines), *lines],
        }
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
