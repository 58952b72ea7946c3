"""The client half of FedAvg in Flower. A module of its own, so that Ray sends its name and not its code."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peer_work import Job, Work, train_client
from torch import nn

app = ClientApp()


@functools.cache
def resident(path: str) -> tuple[Work, nn.Module]:
    """Return the data and a module, made once in each of Ray's processes."""
    torch.set_num_threads(1)
    work = Work.load(Path(path))
    return work, work.network()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return what one client makes of the weights that it received; trains with the plain loop's code."""
    config = message.content["config"]
    work, module = resident(config["work"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples = work.samples(context.node_config["partition-id"])
    job = Job(config["epochs"], config["batch-size"], config["lr"], rounds=1)
    train_client(module, list(module.parameters()), *samples, job)
    content = RecordDict(
        {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": len(samples[0])}),
        }
    )
    return Message(content=content, reply_to=message)
