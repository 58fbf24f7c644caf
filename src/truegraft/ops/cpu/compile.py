"""Compile kernels.c with the machine's C compiler, once, and keep the library in a cache.

The library is named by the source, the flags and the processor, so that a home shared by several
machines holds one for each. Where that fails the caller falls back to plain PyTorch, and a warning
says why: the tokens stay exact, but nobody should be slow without knowing it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
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
    """The compiled kernels, or None, with a warning that says why there are none."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        _warn("no C compiler (cc, gcc or clang) is on the PATH")
        return None
    library = cache_directory() / f"cpu-kernels-{_key(compiler)}.so"
    try:
        if not library.exists():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        _warn(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()}")
    except (OSError, subprocess.TimeoutExpired) as error:
        _warn(str(error))
    return None


def _warn(reason: str) -> None:
    warnings.warn(
        f"the CPU kernels cannot be compiled, plain PyTorch computes instead, exact but slower: "
        f"{reason}. TRUEGRAFT_CPU_OPS=reference chooses this without a warning.",
        stacklevel=4,
    )


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


def _compile(compiler: str, library: Path) -> None:
    """Compile beside the target and move into place, so that no one loads half a library."""
    source = Path(__file__).with_name(SOURCES[0])
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with built.open("rb") as file:
            os.fsync(file.fileno())  # a half-written library would crash whoever loads it
        built.replace(library)
