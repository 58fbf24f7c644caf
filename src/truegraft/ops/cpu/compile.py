"""Compile kernels.c with the machine's C compiler, once, and keep the library in a cache.

The library is named by the source, the flags and the processor, so that a home shared by several
machines holds one for each. No compiler is not an error: the caller falls back to plain PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("kernels.c", "kernels.h")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c11",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",  # a product and a sum round apart, in vector loops and in their tails
    "-fno-math-errno",
    "-fno-trapping-math",
)


def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no C compiler or it fails."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    library = cache_directory() / f"cpu-kernels-{_key(compiler)}.so"
    if not library.exists() and not _compile(compiler, library):
        return None
    return ctypes.CDLL(str(library))


def cache_directory() -> Path:
    """Where compiled kernels lie: $TRUEGRAFT_CACHE, or truegraft in the user's cache folder."""
    given = os.environ.get("TRUEGRAFT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "truegraft"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    digest.update(repr((FLAGS, compiler, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, library: Path) -> bool:
    """Compile beside the target and move into place, so that no one loads half a library."""
    source = Path(__file__).with_name(SOURCES[0])
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, "-o", str(built), str(source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            built.replace(library)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
