"""Exact unlearning beside an approximate method: distance to the exact model, membership inference, rounds.

    python -m studies.unlearning results/unlearning

Four clients of digits by Dirichlet(0.5), FedAvg with an MLP, 60 rounds of eight epochs, three seeds; the client with
most samples is unlearned. A third of its labels are drawn anew: whoever knows them can only have seen them.
Exact unlearning (`tailorfl unlearn`) replays all rounds without it. FedEraser (Liu et al., IWQoS 2021)
keeps the clients' updates of every second round. From the initial model it takes as many steps as were kept: the
remaining clients train for half as many epochs, and each keeps the direction of its new update with the length of the
old one,

    U_i  =  ‖Δ_i‖ Û_i / ‖Û_i‖,      w  ←  w + Σ_i p_i U_i

Membership inference tells training samples of the unlearned client from its test samples by their loss (Yeom et al.,
CSF 2018): .5 is chance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from sklearn.metrics import roc_auc_score
from tensordict import TensorDict
from torch import Tensor

from studies.program import program, run
from tailorfl import Federation, Model, Replies, Simulation, TrainConfig, build_federation
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.registry import build
from tailorfl.training import tree

SEEDS, CLIENTS, ROUNDS, EPOCHS, EVERY = (0, 1, 2), 4, 60, 8, 2
WRONG = 1 / 3
"""Share of the unlearned client's labels that are drawn anew."""
app = program()
kept: list[tuple[tuple[int, ...], TensorDict, Tensor]] = []
"""The clients of a round, their updates [clients, ...], and their weights."""


class Recording(FedAvg):
    """FedAvg whose server keeps the updates of its clients."""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        """Keep the round's updates, and average."""
        kept.append((replies.clients, replies.stack - server["w"], replies.weights()))
        return super().aggregate(server, replies)


def with_wrong_labels(federation: Federation, client: int, seed: int) -> Federation:
    """Return the federation in which a share of a client's labels are drawn anew, for training and for testing."""
    rng, y = np.random.default_rng(seed), federation.source.y.clone()
    rows = np.concatenate([part[client] for part in (federation.train, federation.val, federation.test)])
    drawn = rng.choice(rows, round(WRONG * len(rows)), replace=False)
    y[torch.from_numpy(drawn)] = torch.from_numpy(rng.integers(0, federation.source.outputs, len(drawn)))
    return replace(federation, source=replace(federation.source, y=y))


def simulation(federation: Federation, seed: int, epochs: int) -> Simulation:
    """Return a simulation that has not begun."""
    source = federation.source
    model = Model(lambda: build("mlp", source.input_shape, source.outputs, hidden=[256]))
    return Simulation(
        Recording.model_validate({}),
        federation,
        model,
        TrainConfig(epochs=epochs, batch_size=16, lr=0.1),
        seed=seed,
    )


def trained(federation: Federation, seed: int) -> TensorDict:
    """Return the global model after all rounds."""
    sim = simulation(federation, seed, EPOCHS)
    kept.clear()
    for _ in range(ROUNDS):
        sim.step()
    model = sim.global_model()
    assert model is not None
    return model


def erased(federation: Federation, seed: int, left: int) -> TensorDict:
    """Return FedEraser's model, from the updates that are kept of the run with the client."""
    old = kept[::EVERY]
    sim = simulation(federation, seed, EPOCHS // 2)
    model: TensorDict = sim.server["w"]
    for clients, updates, _ in old:
        places = [k for k, client in enumerate(clients) if client != left]
        kept.clear()
        sim.server = TensorDict({**dict(sim.server.items()), "w": model})
        sim.step(tuple(clients[k] for k in places))
        ((_, new, weights),) = kept
        lengths = [
            torch.stack([norm(u[k]) for k in at]) for u, at in ((updates, places), (new, range(len(places))))
        ]
        factor = weights.float() * lengths[0].float() / lengths[1].float().clamp(min=1e-12)
        model = model + TensorDict({n: torch.einsum("k,k...->...", factor, t) for n, t in new.items()})
    return model


def norm(update: TensorDict) -> Tensor:
    """Return the length of an update over all its numbers."""
    return tree.norm(update)


def losses(federation: Federation, model: Model, state: TensorDict, rows: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of every sample, and whether it is classified correctly."""
    x, y = federation.source.x[rows], federation.source.y[rows]
    with torch.no_grad():
        outputs = model(tree.tensors(state), x)
    return torch.nn.functional.cross_entropy(outputs, y, reduction="none"), (outputs.argmax(1) == y).float()


def measured(
    full: Federation, left: int, model: Model, state: TensorDict, exact: TensorDict, scale: float
) -> Any:
    """Return the distance to the exact model, membership inference and accuracies of a model."""
    inside, of_train = losses(full, model, state, full.train[left])
    outside, _ = losses(full, model, state, full.test[left])
    members = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
    others = np.concatenate([rows for i, rows in enumerate(full.test) if i != left])
    return {
        "distance": float(norm(state - exact)) / scale,
        "membership AUC": roc_auc_score(members, -torch.cat([inside, outside]).numpy()),
        "accuracy on its training samples": float(of_train.mean()),
        "accuracy on the others' test samples": float(losses(full, model, state, others)[1].mean()),
    }


@app.command()
def main(out: Annotated[Path, typer.Argument(help="Folder for the table.")]) -> None:
    """Train, unlearn exactly and approximately, and write unlearning.csv and unlearning.md."""
    rows = []
    for seed in SEEDS:
        full = build_federation("digits", clients=CLIENTS, partition_options={"alpha": 0.5}, seed=seed)
        left = int(np.argmax([len(part) for part in full.train]))
        full = with_wrong_labels(full, left, seed)
        others = full.without([full.names[left]])
        whole = trained(full, seed)
        fast = erased(others, seed, left)
        exact = trained(others, seed)
        fresh = trained(others, seed + 100)
        model = simulation(full, seed, EPOCHS).model
        scale = float(norm(whole - exact))
        for name, state, replayed in (
            ("with the client", whole, 0),
            ("exact", exact, ROUNDS),
            ("trained anew, another seed", fresh, ROUNDS),
            ("FedEraser", fast, len(range(0, ROUNDS, EVERY)) / 2),
        ):
            numbers = measured(full, left, model, state, exact, scale)
            rows.append({"model": name, "seed": seed, "rounds' worth of training": replayed, **numbers})
    frame = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "unlearning.csv", index=False, float_format="%.5g", lineterminator="\n")
    mean = frame.drop(columns="seed").groupby("model", sort=False).mean().round(3)
    heads = ["model", *mean.columns]
    lines = [heads, ["---", *["---:"] * len(mean.columns)]]
    lines += [
        [str(name), *(f"{value:g}" for value in row)]
        for name, row in zip(mean.index, mean.to_numpy(), strict=True)
    ]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (out / "unlearning.md").write_text(text, encoding="utf-8")
    print(mean.to_string())


if __name__ == "__main__":
    run(app)
