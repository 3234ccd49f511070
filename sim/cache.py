"""A content-addressed cache of folders that are costly to make: atomic writes, one maker at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`$WMRL_CACHE`, else `wmrl` under the user's cache folder."""
    if "WMRL_CACHE" in os.environ:
        return Path(os.environ["WMRL_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "wmrl"


def cached_folder(kind: str, key: object, make: Callable[[Path], None]) -> Path:
    """The folder `<cache>/<kind>/<hash of key>`, filled by `make(folder)` if it is not there yet.

    key   anything JSON can hold; everything the content depends on
    make  fills an empty folder; it is renamed into place only when `make` has returned, so that a killed maker leaves nothing
          behind that could be taken for finished. Processes that want the same folder wait for one maker.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    parent = cache_folder() / kind
    target = parent / digest
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with open(parent / f".{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=parent))
        try:
            make(scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
