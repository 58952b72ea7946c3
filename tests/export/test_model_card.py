"""The model card of an export against its run, and its upload to a server that speaks the hub's protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.torch import load_file

import tailorfl
from export.exporting import QUICK
from tailorfl.errors import ConfigError
from tailorfl.export.folder import Exported, export
from tailorfl.export.model_card import CARD, FORMAT, card_of, upload
from tailorfl.report.clients import clients_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clients with a private and a plain method."""
    folder = tmp_path_factory.mktemp("card") / "run"
    private = {"name": "ditto", "label": "private", "train": {"dp": {"clip": 1.0, "noise": 2.0}}}
    tailorfl.run(QUICK, methods=["ditto", private], data={"clients": 3, "samples": 150}, out=folder)
    return folder


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    out = tmp_path_factory.mktemp("models")
    plain = export(run, out / "plain", everyone=True, shared=True, method="ditto", license_id="mit")
    private = export(run, out / "private", clients=["client-1"], shared=True, method="private")
    return {f"{model.path.parent.name} {model.path.name}": model for model in (*plain, *private)}


def head(model: Exported) -> dict[str, Any]:
    text = (model.path / CARD).read_text()
    assert text.startswith("---\n")
    content: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return content


def test_a_client_that_was_left_out_is_not_of_the_federation(tmp_path: Path) -> None:
    data = {"clients": 3, "samples": 150, "excluded_clients": ["client-1"]}
    tailorfl.run(QUICK, method="fedavg", data=data, out=tmp_path / "run")
    (model,) = export(tmp_path / "run", tmp_path / "out", shared=True)
    assert model.facts["clients"] == 2


def test_metadata_are_those_of_the_run(models: dict[str, Exported], run: Path) -> None:
    result = tailorfl.ExperimentResult.load(run)
    (store,) = [store for summary, store in result.jobs if summary["label"] == "ditto"]
    frame = store.clients()
    last = frame.query(f"round == {frame['round'].max()} and set == 'local' and model == 'personal'")
    for client, accuracy in zip(last["client"], last["accuracy"], strict=True):
        content = head(models[f"plain client-{client}"])
        (entry,) = content["model-index"][0]["results"]
        values = {metric["type"]: metric["value"] for metric in entry["metrics"]}
        assert values["accuracy"] == pytest.approx(accuracy)
        assert entry["dataset"]["type"] == "digits"
        assert content["license"] == "mit"
        assert content["pipeline_tag"] == "image-classification"
        assert {"federated-learning", "ditto"} <= set(content["tags"])
    assert head(models["private client-1"])["license"] == "unknown"


def test_the_hub_reads_it(models: dict[str, Exported]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    for model in models.values():
        data = hub.ModelCard.load(model.path / CARD).data
        assert {result.metric_type for result in data.eval_results} >= {"accuracy"}


def test_samples_are_counted_and_never_shown(models: dict[str, Exported], run: Path) -> None:
    everybody = [models[f"plain client-{client}"].facts["samples"] for client in range(3)]
    total = models["plain global"].facts["samples"]
    assert {part: sum(counts[part] for counts in everybody) for part in total} == total
    assert sum(total.values()) == 150


def test_the_interval_is_that_of_the_client_report(models: dict[str, Exported], run: Path) -> None:
    report = clients_of(tailorfl.ExperimentResult.load(run), methods=["ditto"])
    for line in report.lines:
        assert line.interval is not None
        facts = models[f"plain {line.name}"].facts
        assert facts["intervals"] == {"accuracy": (line.interval.low, line.interval.high)}
        text = (models[f"plain {line.name}"].path / CARD).read_text()
        assert f"{100 * line.interval.low:.1f} % to {100 * line.interval.high:.1f} %" in text
    assert models["plain global"].facts["intervals"] == {}


def test_privacy_is_the_least_of_all_whose_samples_shape_the_model(
    models: dict[str, Exported], run: Path, tmp_path: Path
) -> None:
    """A personal model tells of other clients, too, unless it learned alone."""
    assert models["plain client-1"].facts["privacy"] is None
    spent = pd.read_csv(next(run.glob("private/seed-*/privacy.csv")), dtype={"client": str})
    largest = spent["epsilon"].max()
    assert spent[spent["client"] == "1"]["epsilon"].max() < largest < np.inf
    for model in (models["private client-1"], models["private global"]):
        facts = model.facts["privacy"]
        assert facts["epsilon"] == pytest.approx(largest)
        assert f"ε = {largest:.3g} at δ = {facts['delta']:g}" in (model.path / CARD).read_text()
    data, private = {"clients": 3, "samples": 150}, {"dp": {"clip": 1.0, "noise": 2.0}}
    tailorfl.run(QUICK, methods=["local"], data=data, train=private, out=tmp_path / "alone")
    (alone,) = export(tmp_path / "alone", tmp_path / "of-one", clients=["client-1"])
    spent = pd.read_csv(next(tmp_path.glob("alone/local/seed-*/privacy.csv")), dtype={"client": str})
    of_client = spent[spent["client"] == "1"]["epsilon"].max()
    assert of_client < spent["epsilon"].max()
    assert alone.facts["privacy"]["epsilon"] == pytest.approx(of_client)


def test_privacy_of_a_held_out_client_counts_its_adaptation(tmp_path: Path) -> None:
    """Also where it was never evaluated; and the seed, from which the noise follows, is not told."""
    data = {"clients": 3, "samples": 150, "heldout_clients": 1, "seed": 4}
    train = {"dp": {"clip": 1.0, "noise": 2.0}, "epochs": 8, "batch_size": 5}
    settings = {"train": train, "eval": {"sets": ["local"], "final": ["local"]}}
    tailorfl.run({**QUICK, **settings}, methods=["local"], data=data, out=tmp_path / "run")
    found = {}
    for steps in (0, 1, 40):
        (model,) = export(tmp_path / "run", tmp_path / str(steps), clients=["3"], steps=steps)
        found[steps] = model.facts["privacy"]["epsilon"]
    assert found[40] > found[1] > found[0] == 0
    assert "seed" not in model.facts["provenance"]
    assert "seed" not in model.facts["provenance"]["settings"]["data"]
    assert "seed not stated" in (model.path / CARD).read_text()


def test_privacy_of_clients_covers_no_personal_model(tmp_path: Path) -> None:
    """It is trained on the client's samples without noise."""
    settings = {"weights": "uniform", "train": {"dp": {"clip": 1.0, "noise": 2.0, "level": "client"}}}
    data = {"clients": 3, "samples": 150}
    tailorfl.run(QUICK | settings, methods=["ditto"], data=data, out=tmp_path / "run")
    own, shared = export(tmp_path / "run", tmp_path / "out", clients=["client-1"], shared=True)
    assert (own.facts["kind"], own.facts["privacy"]) == ("personal", None)
    assert "without differential privacy" in (own.path / CARD).read_text()
    assert shared.facts["privacy"]["level"] == "client"


def test_few_test_samples_and_one_client_are_named_as_limits(models: dict[str, Exported]) -> None:
    facts = models["plain client-1"].facts
    limits = {samples: card_of({**facts, "samples": {"test": samples}}) for samples in (99, 100)}
    assert "99 test samples" in limits[99]
    assert "metrics are uncertain" not in limits[100]
    assert "not evaluated" in limits[100]
    assert "not evaluated" not in card_of(models["plain global"].facts)
    assert facts["format"] == FORMAT


def test_a_client_whose_method_has_only_a_global_model_gets_the_card_of_that_model(tmp_path: Path) -> None:
    """Trees are no network of the run's settings, and ε bounds what the model tells of every client."""
    private = {"name": "fedavg", "train": {"dp": {"clip": 1.0, "noise": 2.0}}}
    methods = ["federated_trees", private]
    tailorfl.run(QUICK, methods=methods, data={"clients": 3, "samples": 150}, out=tmp_path / "run")
    (trees,) = export(tmp_path / "run", tmp_path / "trees", clients=["client-1"], method="federated_trees")
    (network,) = export(tmp_path / "run", tmp_path / "network", clients=["client-1"], method="fedavg")
    assert trees.facts["architecture"] == {
        "name": "TreeEnsemble",
        "parameters": load_file(trees.path / "model.safetensors")["value"].numel() + 10,
    }
    assert network.facts["architecture"]["hidden"]
    for model in (trees, network):
        assert (model.facts["kind"], model.facts["is_global"]) == ("global", False)
        assert "Fitted to one client" not in (model.path / CARD).read_text()
    spent = pd.read_csv(next(tmp_path.glob("run/fedavg/seed-*/privacy.csv")), dtype={"client": str})
    assert spent["epsilon"].nunique() > 1
    assert network.facts["privacy"]["epsilon"] == pytest.approx(spent["epsilon"].max())


class Hub(BaseHTTPRequestHandler):
    """The three requests of an upload, as the hub answers them; `received` has what it got."""

    received: dict[str, Any]

    def do_POST(self) -> None:
        """Create a repository, say how files are sent, or commit them."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}/sam/heart"
        if self.path == "/api/repos/create":
            self.received["repository"] = json.loads(body)
            return self._answer({"url": address, "name": "sam/heart"}, refused="refused" in body.decode())
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            sent = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer({"files": [{**file, **sent} for file in json.loads(body)["files"]]})
        files = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
        self.received["files"] = {file["path"]: base64.b64decode(file["content"]) for file in files}
        oid = "0" * 40
        return self._answer({"commitUrl": f"{address}/commit/{oid}", "commitOid": oid, "success": True})

    def do_GET(self) -> None:
        """Describe the repository."""
        self._answer({"id": "sam/heart", "sha": "0" * 40, "siblings": []}, refused="refused" in self.path)

    def _answer(self, content: dict[str, Any], refused: bool = False) -> None:
        text = json.dumps({"error": "no"} if refused else content).encode()
        self.send_response(403 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    pytest.importorskip("huggingface_hub")
    handler = type("Listening", (Hub,), {"received": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.received
    server.shutdown()
    server.server_close()
    thread.join()


def pushed(
    run: Path, out: Path, endpoint: str, repository: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Export and upload as a user does, with the hub at another address."""
    command = ["export", str(run), "--method", "ditto", "--out", str(out), "--push", repository, *words]
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "tailorfl", *command]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_an_export_is_uploaded_whole_and_private(run: Path, hub: Any, tmp_path: Path) -> None:
    endpoint, received = hub
    done = pushed(run, tmp_path, endpoint, "sam/heart", "--client", "client-1", "--license", "mit")
    assert done.returncode == 0, done.stderr
    wish = received["repository"]  # of older and newer huggingface_hub
    assert wish.get("private") is True or wish.get("visibility") == "private"
    folder = tmp_path / "client-1"
    assert received["files"] == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert CARD in received["files"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_upload_to_a_hub_that_refuses_or_is_not_there_is_an_error(
    run: Path, hub: Any, tmp_path: Path, closed: bool
) -> None:
    endpoint, received = "http://127.0.0.1:9" if closed else hub[0], hub[1]
    done = pushed(run, tmp_path, endpoint, "sam/refused", "--client", "client-1")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "files" not in received
    assert (tmp_path / "client-1" / CARD).is_file()


def test_one_model_goes_to_one_repository_and_leaves_no_base_behind(models: dict[str, Exported]) -> None:
    pytest.importorskip("huggingface_hub")
    model, other = models["plain client-1"], models["plain client-2"]
    on_base = {**model.facts, "transformer": {"base": "../base"}}
    for exported, repository in (
        ({model.path: model.facts, other.path: other.facts}, "sam/heart"),
        ({model.path: model.facts}, "not a name"),
        ({model.path: on_base}, "sam/heart"),
    ):
        with pytest.raises(ConfigError):
            upload(exported, repository)
