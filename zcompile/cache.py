"""What was measured once, kept on disk for the next run: small JSON files, one a key.

A file holds the key that it was written for beside its value, so a file that was copied, renamed or
cut is known for what it is. Writing is atomic: several jobs may read and write one key at a time,
and each finds a whole file or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zcompile.errors import ZeroWarning

VERSION = 1

T = TypeVar("T")


def folder() -> Path:
    """$ZCOMPILE_CACHE, or zcompile in $XDG_CACHE_HOME, or ~/.cache/zcompile."""
    if own := os.environ.get("ZCOMPILE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "zcompile"
    return Path.home() / ".cache" / "zcompile"


def path(kind: str, key: Mapping[str, Any]) -> Path:
    """Where a value stands. kind: what it is, as in "links"; key: everything it depends on."""
    digest = hashlib.sha256(_canonical(key).encode()).hexdigest()
    return folder() / kind / f"{digest[:24]}.json"


def load(kind: str, key: Mapping[str, Any], parse: Callable[[Any], T]) -> T | None:
    """The value that was stored under `key`, or None. A file that is damaged, of another key or
    that `parse` refuses (by ValueError, TypeError or KeyError) is left out with a ZeroWarning."""
    where = path(kind, key)
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise ValueError(f"it is no file of version {VERSION}")
        if _canonical(raw.get("key")) != _canonical(key):
            raise ValueError("it was written for something else")
        return parse(raw["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"{where} cannot be used ({type(error).__name__}: {error}) and will be written anew",
            ZeroWarning,
            stacklevel=2,
        )
        return None


def store(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keep a JSON value for `load`. Where nothing can be written, a ZeroWarning says so."""
    where = path(kind, key)
    text = json.dumps({"version": VERSION, "key": key, "value": value}, indent=1)
    try:
        write(where, text)
    except OSError as error:
        warnings.warn(
            f"{where} cannot be written ({error}), so the next run measures again; "
            "set ZCOMPILE_CACHE to a folder that can",
            ZeroWarning,
            stacklevel=2,
        )


def write(where: Path, text: str) -> None:
    """Replace a file in one step; makes its folder."""
    where.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=where.parent, prefix=f".{where.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, where)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _canonical(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
