"""Features of images, computed once, for recipes that train small parts on top of a frozen one.

    python studies/features.py cifar10 runs/features/cifar10.npz [--samples N]
    python studies/features.py pacs runs/features/pacs.npz [--samples N]
    python studies/features.py mnist runs/features/mnist.npz [--samples N]

cifar10: 128 principal components of pixels, fitted on Tiny-ImageNet (no image of CIFAR-10 is looked at), divided by the
deviation of the first; official test part kept. pacs: pooled features of a ResNet-20 trained on CIFAR-10, images at 32
pixels, standardised by their own mean and deviation over all domains. mnist: pixels, each standardised by its own mean
and deviation over all images, (x - m) / (s + 0.001) of 0 to 255, as pFedMe's release has them. Source `features` of a
recipe reads the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.data.storage import data_file
from tailorfl.models.registry import build
from tailorfl.models.weights import load_weights

COMPONENTS = 128
BATCH = 500


def pixels(source: Source) -> np.ndarray:
    """Return the images as `[samples, features]` in [0, 1]."""
    return (source.x.reshape(len(source), -1).to(torch.float32) / 255).numpy()


def cifar10(samples: int | None) -> dict[str, Any]:
    """Return the arrays of CIFAR-10 in principal components of Tiny-ImageNet."""
    public = pixels(load_source("tinyimagenet", samples=samples))
    centre = public.mean(0)
    spread, axes = np.linalg.eigh(np.cov(public.T))
    largest = axes[:, ::-1][:, :COMPONENTS]
    source = load_source("cifar10", samples=samples)
    x = (pixels(source) - centre) @ largest / np.sqrt(spread[-1])
    assert source.test is not None
    return {"x": x, "y": source.y.numpy(), "test": source.test.numpy(), "classes": source.info["classes"]}


def mnist(samples: int | None) -> dict[str, Any]:
    """Return the arrays of MNIST, each pixel standardised by itself."""
    source = load_source("mnist")
    rows = slice(samples)
    x = 255 * pixels(source).astype(np.float64)[rows]
    x = ((x - x.mean(0)) / (x.std(0) + 0.001)).astype(np.float32)
    return {"x": x, "y": source.y.numpy()[rows], "classes": source.info["classes"]}


def pacs(samples: int | None) -> dict[str, Any]:
    """Return the arrays of PACS in pooled features of a ResNet-20."""
    source = load_source("pacs", samples=samples, side=32)
    net = build("resnet20", (3, 32, 32), 10)
    load_weights(net, data_file("weights/resnet20_cifar10.npz"))
    net.eval()
    net.linear = torch.nn.Identity()
    with torch.no_grad():
        parts = [net(source.take(rows)) for rows in torch.split(torch.arange(len(source)), BATCH)]
    x = torch.cat(parts).numpy()
    x = (x - x.mean(0)) / x.std(0)
    domains = {"domain": source.groups["domain"].numpy(), "domains": source.group_names["domain"]}
    return {"x": x, "y": source.y.numpy(), "classes": source.info["classes"], **domains}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("cifar10", "mnist", "pacs"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--samples", type=int, help="only so many images")
    given = parser.parse_args()
    arrays = {"cifar10": cifar10, "mnist": mnist, "pacs": pacs}[given.which](given.samples)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.file, **{**arrays, "x": arrays["x"].astype(np.float32)})


if __name__ == "__main__":
    main()
