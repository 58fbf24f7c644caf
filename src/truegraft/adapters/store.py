"""Adapter versions in host memory: names are aliases, content is identity.

`load` reads a directory once and again only when its files change; a changed adapter is a new
version, and the users of the old one keep it. The least recently used versions leave when there are
too many, but none that is in use or pinned. Every method may be called from any thread. Knows
nothing about devices; `table` copies from here to there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import RLock

import torch

from truegraft.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    BaseWeight,
    read_adapter,
)
from truegraft.api import LoRARequest
from truegraft.config import LORA_PAGE_RANK
from truegraft.errors import AdapterError, ConfigError, UnknownAdapterError
from truegraft.model.architecture import TargetShape

_MAX_ATTEMPTS = 3  # reads of an adapter whose files change meanwhile

FileKey = tuple[str, tuple[tuple[int, int, int], ...]]
"""Resolved directory, and (size, mtime in ns, inode) of its two files."""


@dataclass(frozen=True)
class AdapterVersion:
    """One adapter's content under the name that asked for it."""

    name: str
    path: str
    fingerprint: str
    adapter: Adapter
    num_pages: tuple[int, ...]  # 16-rank pages per target module, in the order of the targets


@dataclass
class _Entry:
    """A version that the store holds. num_users: set by acquire and release."""

    version: AdapterVersion
    num_users: int = 0


class AdapterStore:
    """At most `max_cpu_loras` versions; more only while that many are in use or pinned.

    targets: module -> shape, of which the order is the order of `num_pages`. base_weight: as in
    `read_adapter`. `num_reads` counts the directories that were read.
    """

    def __init__(
        self,
        targets: Mapping[str, TargetShape],
        *,
        max_cpu_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        base_fingerprint: str = "",
        base_weight: BaseWeight | None = None,
    ) -> None:
        self.num_reads = 0
        self._targets = dict(targets)
        self._max_entries = max_cpu_loras
        self._max_rank, self._dtype = max_rank, dtype
        self._base_fingerprint, self._base_weight = base_fingerprint, base_weight
        self._lock = RLock()
        self._closed = False
        self._entries: OrderedDict[str, _Entry] = (
            OrderedDict()
        )  # fingerprint -> entry, oldest first
        self._aliases: dict[str, tuple[str, str]] = {}  # name -> path, fingerprint
        self._pinned: set[str] = set()  # names
        self._known_files: dict[FileKey, str] = {}  # -> fingerprint
        self._reading: dict[FileKey, Future[Adapter]] = {}

    def load(self, request: LoRARequest) -> AdapterVersion:
        """The version that `request` names, read from disk only where that is needed.

        Raises AdapterError with every reason; the name then keeps what it stood for.
        """
        for _ in range(_MAX_ATTEMPTS):
            key = _file_key(request.lora_path)
            adapter = self._cached(key) or self._read(request.lora_path, key)
            unchanged = key == _file_key(request.lora_path)
            with self._lock:
                self._reading.pop(key, None)
                if unchanged:
                    return self._enter(request, key, adapter)
        raise AdapterError(request.lora_path, "its files keep changing; load it when written.")

    def get(self, name: str) -> AdapterVersion:
        """The version that `name` stands for; read again if it had to leave host memory.

        Raises UnknownAdapterError, or AdapterError if it cannot be read again.
        """
        with self._lock:
            if name not in self._aliases:
                raise UnknownAdapterError(name, self._aliases)
            path, fingerprint = self._aliases[name]
            if fingerprint in self._entries:
                self._entries.move_to_end(fingerprint)
                return self._named(name, path, fingerprint)
        return self.load(LoRARequest(name, lora_path=path))

    def by_fingerprint(self, fingerprint: str) -> AdapterVersion:
        """The version with this content. Raises UnknownAdapterError if it is not held."""
        with self._lock:
            if fingerprint not in self._entries:
                raise UnknownAdapterError(fingerprint, self._entries)
            return self._entries[fingerprint].version

    def acquire(self, version: AdapterVersion) -> None:
        """One user more: the version stays until `release`."""
        with self._lock:
            self._check_open()
            # NOTE: it may have left between load and acquire; its holder still has it.
            self._entries.setdefault(version.fingerprint, _Entry(version)).num_users += 1
            self._entries.move_to_end(version.fingerprint)

    def release(self, version: AdapterVersion) -> None:
        """One user less; a version without name and users leaves at once."""
        with self._lock:
            if self._closed:
                return
            entry = self._entries[version.fingerprint]
            assert entry.num_users > 0, f"adapter {version.name!r} is released too often"
            entry.num_users -= 1
            self._shrink()

    def num_users(self, version: AdapterVersion) -> int:
        """Users of this content, under whatever name."""
        with self._lock:
            entry = self._entries.get(version.fingerprint)
            return entry.num_users if entry else 0

    def remove(self, name: str) -> None:
        """Forget `name` at once; its memory goes when the last user ends. May raise as `get`."""
        with self._lock:
            if self._aliases.pop(name, None) is None:
                raise UnknownAdapterError(name, self._aliases)
            self._pinned.discard(name)
            self._shrink()

    def pin(self, name: str) -> None:
        """Keep what `name` stands for in host memory until `remove`. Raises as `get`."""
        version = self.get(name)
        with self._lock:
            if self.names().get(name) != version.fingerprint:  # reloaded or removed meanwhile
                return self.pin(name)
            self._entries.setdefault(version.fingerprint, _Entry(version))
            self._pinned.add(name)

    def names(self) -> dict[str, str]:
        """Name -> fingerprint."""
        with self._lock:
            return {name: fingerprint for name, (_, fingerprint) in self._aliases.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all versions held."""
        with self._lock:
            return sum(entry.version.adapter.num_bytes for entry in self._entries.values())

    def close(self) -> None:
        """Free everything; later loads raise ConfigError."""
        with self._lock:
            self._closed = True
            for held in (self._entries, self._aliases, self._pinned, self._known_files):
                held.clear()

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        with self._lock:
            named = set(self.names().values())
            for fingerprint, entry in self._entries.items():
                assert entry.version.fingerprint == fingerprint
                assert entry.num_users > 0 or fingerprint in named, "a version that nobody needs"
            assert self._pinned <= self._aliases.keys(), "a pinned name that is gone"
            assert self._kept() <= self._entries.keys(), "a pinned version that is gone"
            idle = [
                f for f, e in self._entries.items() if not e.num_users and f not in self._kept()
            ]
            assert len(self._entries) <= self._max_entries or not idle, "too many versions"
            assert set(self._known_files.values()) <= self._entries.keys()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the adapter store is closed; open a new engine.")

    def _cached(self, key: FileKey) -> Adapter | None:
        with self._lock:
            self._check_open()
            entry = self._entries.get(self._known_files.get(key, ""))
            return entry.version.adapter if entry else None

    def _read(self, path: str, key: FileKey) -> Adapter:
        """Read `path`, or wait for the thread that does so already."""
        with self._lock:
            future = self._reading.get(key)
            if is_reader := future is None:
                future = self._reading[key] = Future()
                self.num_reads += 1
        if is_reader:
            self._run(future, path)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._reading.pop(key, None)
            raise

    def _run(self, future: Future[Adapter], path: str) -> None:
        try:
            adapter = read_adapter(
                path,
                self._targets,
                max_rank=self._max_rank,
                dtype=self._dtype,
                base_fingerprint=self._base_fingerprint,
                base_weight=self._base_weight,
            )
        except BaseException as error:  # handed to every thread that waits
            future.set_exception(error)
        else:
            future.set_result(adapter)

    def _enter(self, request: LoRARequest, key: FileKey, adapter: Adapter) -> AdapterVersion:
        """Make the request's name stand for `adapter`. The caller holds the lock."""
        self._check_open()
        name, path, fingerprint = request.lora_name, request.lora_path, adapter.fingerprint
        if fingerprint not in self._entries:
            pages = tuple(_num_pages(adapter, module) for module in self._targets)
            version = AdapterVersion(name, path, fingerprint, adapter, pages)
            self._entries[fingerprint] = _Entry(version)
        self._entries.move_to_end(fingerprint)
        self._aliases[name] = (path, fingerprint)
        self._known_files[key] = fingerprint
        version = self._named(name, path, fingerprint)
        self._shrink()
        return version

    def _named(self, name: str, path: str, fingerprint: str) -> AdapterVersion:
        return replace(self._entries[fingerprint].version, name=name, path=path)

    def _kept(self) -> set[str]:
        return {self._aliases[name][1] for name in self._pinned}

    def _shrink(self) -> None:
        """Drop versions without name and users, then the least recently used idle ones."""
        named, kept = set(self.names().values()), self._kept()
        for fingerprint, entry in list(self._entries.items()):
            full = len(self._entries) > self._max_entries and fingerprint not in kept
            if entry.num_users == 0 and (fingerprint not in named or full):
                del self._entries[fingerprint]
        self._known_files = {k: f for k, f in self._known_files.items() if f in self._entries}


def _num_pages(adapter: Adapter, module: str) -> int:
    weights = adapter.modules.get(module)
    return -(-weights.rank // LORA_PAGE_RANK) if weights else 0


def _file_key(path: str) -> FileKey:
    """A missing file leaves zeros: reading then says what is wrong."""
    try:
        folder = os.path.realpath(path)
    except ValueError:  # a NUL in the path
        folder = path
    return folder, tuple(_stat(os.path.join(folder, name)) for name in (CONFIG_FILE, WEIGHTS_FILE))


def _stat(file: str) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ino
