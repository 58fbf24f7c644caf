"""Collect the training text from Debian packages into three JSON-lines files.

Downloads each package with `apt-get download`, unpacks it (nothing is installed), turns its files
into plain text and writes one document a line to prose.jsonl, docs.jsonl and python.jsonl, with
sources.json saying package, version, licence and size. Knows nothing about tokens.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

MAX_FILE_BYTES = 200_000  # longer Python files are tables or generated code
MIN_DOC_CHARS = 200
CHUNK_CHARS = 30_000  # long books are cut here, so that a held-out piece is not a whole book

Reader = Callable[[Path], Iterator[str]]


@dataclass(frozen=True)
class Source:
    """Files of one Debian package and how to read them."""

    package: str
    licence: str  # of the files that match `glob`, as the package's copyright file gives it
    group: str  # prose, docs or python
    glob: str  # below the unpacked package
    reader: Reader


class _TextExtractor(HTMLParser):
    """Keeps the text of an HTML page without its scripts, navigation and footer."""

    SKIP = frozenset({"script", "style", "nav", "footer", "head", "svg", "button", "form"})
    BLOCK = frozenset(
        {"p", "div", "li", "pre", "h1", "h2", "h3", "h4", "h5", "tr", "dt", "dd", "br", "section"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped: list[str] = []
        self._in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIP:
            self._skipped.append(tag)
        if tag in self.BLOCK:
            self.parts.append("\n")
        self._in_pre = self._in_pre or tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and self._skipped[-1] == tag:
            self._skipped.pop()
        if tag in self.BLOCK:
            self.parts.append("\n")
        if tag == "pre":
            self._in_pre = False

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data if self._in_pre else re.sub(r"\s+", " ", data))


def read_html(path: Path) -> Iterator[str]:
    """One document: the text of the page."""
    extractor = _TextExtractor()
    extractor.feed(path.read_text("utf-8", errors="replace"))
    text = re.sub(r"[ \t]+\n", "\n", "".join(extractor.parts))
    yield re.sub(r"\n\s*\n+", "\n\n", text)


def read_text(path: Path) -> Iterator[str]:
    """One document: the file as it is."""
    if path.stat().st_size <= MAX_FILE_BYTES or path.suffix != ".py":
        yield path.read_text("utf-8", errors="replace")


def read_dictd(path: Path) -> Iterator[str]:
    """One document: a gzip-compatible dictd file, cut into pieces later."""
    yield gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")


def read_wordnet(path: Path) -> Iterator[str]:
    """One document: 'word, other word: gloss' for each synset of a WordNet data file."""
    lines = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        if line.startswith("  ") or " | " not in line:
            continue  # the licence header
        fields, gloss = line.split(" | ", 1)
        columns = fields.split()
        words = [columns[4 + 2 * i].replace("_", " ") for i in range(int(columns[3], 16))]
        lines.append(f"{', '.join(words)}: {gloss.strip()}.")
    # The file is in order of meaning; neighbours belong together, so keep that order.
    yield "\n".join(lines)


def read_r_strings(path: Path) -> Iterator[str]:
    """One document for each character vector in an R lazy-load database."""
    data = path.read_bytes()
    offset = 0
    while offset + 5 <= len(data):
        # A chunk has no stored length here; zlib, bzip2 and xz all say where their stream ends.
        kind = data[offset + 4 : offset + 5]
        decompressor = {b"2": bz2.BZ2Decompressor, b"Z": lzma.LZMADecompressor}.get(kind)
        if decompressor is None:
            stream = zlib.decompressobj()
            raw = stream.decompress(data[offset + 4 :])
            unused = stream.unused_data
        else:
            reader = decompressor()
            raw = reader.decompress(data[offset + 5 :])
            unused = reader.unused_data
        offset = len(data) - len(unused)
        yield "\n".join(_r_character_strings(raw))


def _r_character_strings(raw: bytes) -> list[str]:
    """The elements of a serialized STRSXP: flags ending in type 9, a length, then the bytes."""
    strings, position = [], raw.index(b"\x00\x00\x00\x10") + 8
    while position + 8 <= len(raw) and raw[position + 3] == 9:
        length = max(int.from_bytes(raw[position + 4 : position + 8], "big", signed=True), 0)
        strings.append(raw[position + 8 : position + 8 + length].decode("utf-8", errors="replace"))
        position += 8 + length
    return strings


def read_bible(path: Path) -> Iterator[str]:
    """One document: the whole text, printed by the package's own program, without verse numbers."""
    program = path.parents[3] / "bible-kjv/usr/bin/bible"
    command = [str(program), "-p", str(path.parent), "-f", "-l72", "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout.decode("latin-1")
    yield re.sub(r"(?m)^\w+:\d+ ", "", printed)


PYTHON = "usr/lib/python3*/**/*.py"
SOURCES = (
    Source("r-cran-janeaustenr", "public domain", "prose", "**/data/Rdata.rdb", read_r_strings),
    Source("bible-kjv-text", "public domain", "docs", "usr/lib/bible.data", read_bible),
    Source("dict-devil", "public domain", "prose", "**/*.dict.dz", read_dictd),
    Source("dict-jargon", "public domain", "prose", "**/*.dict.dz", read_dictd),
    Source("golang-1.19-src", "public domain", "prose", "**/Isaac.Newton-Opticks.txt", read_text),
    Source("wordnet-base", "WordNet 3.0", "docs", "usr/share/wordnet/data.*", read_wordnet),
    Source("python3.11-doc", "PSF-2.0", "docs", "**/_sources/**/*.rst.txt", read_text),
    Source("python-django-doc", "BSD-3-Clause", "docs", "**/html/[ftirh]*/**/*.html", read_html),
    Source("sqlite3-doc", "public domain", "docs", "**/*.html", read_html),
    Source("postgresql-doc-15", "PostgreSQL", "docs", "**/html/*.html", read_html),
    Source("apache2-doc", "Apache-2.0", "docs", "**/manual/en/**/*.html", read_html),
    Source("libpython3.11-minimal", "PSF-2.0", "python", PYTHON, read_text),
    Source("libpython3.11-stdlib", "PSF-2.0", "python", PYTHON, read_text),
    Source("libpython3.11-testsuite", "PSF-2.0", "python", PYTHON, read_text),
    Source("python3-django", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-docutils", "public domain, BSD", "python", PYTHON, read_text),
    Source("python3-networkx", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-numpy", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-pandas", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-scipy", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-sklearn", "BSD-3-Clause", "python", PYTHON, read_text),
    Source("python3-sympy", "BSD-3-Clause", "python", PYTHON, read_text),
)
TOOLS = ("bible-kjv",)  # programs that a reader runs; no text is taken from them


def fetch(package: str, folder: Path) -> str:
    """Download and unpack a package below `folder`; returns its version."""
    debs = folder / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    if not list(debs.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", package], cwd=debs, check=True)
    (deb,) = debs.glob(f"{package}_*.deb")
    target = folder / "unpacked" / package
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", str(deb), str(target)], check=True)
    field = subprocess.run(["dpkg-deb", "-f", str(deb), "Version"], capture_output=True, check=True)
    return field.stdout.decode().strip()


def is_wanted(path: Path, source: Source) -> bool:
    """Leave out third-party tests, translations of names and files that are only data."""
    parts = set(path.parts)
    if source.group != "python":
        return not parts & {"releases", "_modules", "genindex.html"}
    return source.licence == "PSF-2.0" or not parts & {"tests", "test", "testing", "locale"}


def is_clean(text: str) -> bool:
    """Mostly ASCII, and lines of a length that people write."""
    if len(text) < MIN_DOC_CHARS:
        return False
    odd = sum(ord(char) > 126 for char in text)
    longest = max(len(line) for line in text.splitlines())
    return odd < 0.02 * len(text) and (longest < 2_000 or longest < 0.1 * len(text))


def chunks(text: str) -> Iterator[str]:
    """Cut a long text at blank lines (or line ends) into pieces of about CHUNK_CHARS."""
    while len(text) > 1.5 * CHUNK_CHARS:
        cut = text.find("\n\n", CHUNK_CHARS)
        cut = cut if 0 <= cut < 1.4 * CHUNK_CHARS else text.find("\n", CHUNK_CHARS)
        if cut < 0:
            break
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    yield text


def documents(source: Source, root: Path) -> Iterator[str]:
    """Every clean document of a source, in path order."""
    paths = sorted(p for p in root.glob(source.glob) if p.is_file() and not p.is_symlink())
    for path in paths:
        if is_wanted(path, source):
            for text in source.reader(path):
                normal = text.replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
                # Python files and manual pages stay whole: their beginning explains their end.
                is_book = source.group == "prose" or len(normal) > 10 * CHUNK_CHARS
                pieces = chunks(normal) if is_book else iter([normal])
                yield from (piece for piece in pieces if is_clean(piece))


def main() -> None:
    """Write the three groups and the list of sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for packages and text")
    args = parser.parse_args()
    seen: set[str] = set()
    listing = []
    for tool in TOOLS:
        fetch(tool, args.work)
    files = {g: (args.work / f"{g}.jsonl").open("w") for g in ("prose", "docs", "python")}
    for source in SOURCES:
        version = fetch(source.package, args.work)
        num_docs = num_chars = 0
        for text in documents(source, args.work / "unpacked" / source.package):
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                num_docs, num_chars = num_docs + 1, num_chars + len(text)
                record = {"source": source.package, "sha256": digest, "text": text}
                files[source.group].write(json.dumps(record) + "\n")
        row = {"package": source.package, "version": version, "licence": source.licence}
        listing.append(row | {"group": source.group, "documents": num_docs, "chars": num_chars})
        print(listing[-1], flush=True)
        if num_docs == 0:
            raise SystemExit(f"{source.package}: no document matched {source.glob}")
    (args.work / "sources.json").write_text(json.dumps(listing, indent=1) + "\n")


if __name__ == "__main__":
    main()
