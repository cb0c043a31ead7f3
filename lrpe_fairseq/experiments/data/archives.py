"""Files of a published tar archive, or of the folder that it was extracted to.

Nothing is extracted under a name that an archive chooses: members are read as streams, in one pass
over the archive.
"""

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError

GZIP = b"\x1f\x8b"
UNREADABLE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True)
class Archive:
    """A tar archive, compressed with gzip.

    file: its name. urls: where it is published. checksum: md5 or sha256; empty if none is
    published. wanted: regular expression that the end of a wanted member's name matches, from the
    start of a name of a folder or file on.
    """

    file: str
    urls: Sequence[str]
    checksum: str
    wanted: str

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match of a member's name, or None if the member is not wanted."""
        return re.search(rf"(?:^|/){self.wanted}$", name)


@dataclass(frozen=True)
class Member:
    """The content of one file of ``source``."""

    stream: IO[bytes]
    source: Path

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes. Raises: UserError for an archive that is damaged."""
        try:
            return self.stream.read(size)
        except UNREADABLE as why:
            raise _damaged(self.source, why) from None


def obtain(archive: Archive, into: Path, from_dir: Path | None = None) -> Path:
    """Return the archive, verified where a checksum is published, or the folder of its files.

    With ``from_dir`` no network is used: the result is the archive in that folder, or the folder
    itself if it contains wanted files. Otherwise the archive is downloaded to ``into``; an
    interrupted download is resumed.

    Raises: UserError if the archive is absent, truncated or another version.
    """
    if from_dir is None:
        if archive.checksum:
            return prep.obtain(archive.file, archive.urls, archive.checksum, into)
        return prep.download(archive.file, archive.urls, into, _is_gzip)
    packed = from_dir / archive.file
    if not packed.is_file():
        if any(True for _ in _wanted_files(archive, from_dir)):
            return from_dir
        raise UserError(
            f"{from_dir} contains neither {archive.file} nor the files of that archive: put one of "
            "them there, or omit --from to download it."
        )
    if archive.checksum and not prep.has_checksum(packed, archive.checksum):
        raise UserError(
            f"{packed} is truncated or not the expected version: its checksum is not "
            f"{archive.checksum}, so fetch it again."
        )
    return packed


def fingerprint(archive: Archive, source: Path) -> str:
    """Return what identifies the content of a result of :func:`obtain`: a checksum."""
    if source.is_file():
        return archive.checksum or prep.digest(source)
    hasher = hashlib.sha256()
    for path in _wanted_files(archive, source):
        name = path.relative_to(source).as_posix()
        hasher.update(f"{name} {prep.digest(path)}\n".encode())
    return hasher.hexdigest()


def files(archive: Archive, source: Path) -> Iterator[tuple[re.Match[str], Member]]:
    """Yield every wanted file of a result of :func:`obtain`: match of its name, content.

    The content can be read until the next file is asked for. A folder is read in the order of its
    names, an archive in its own order.

    Raises: UserError for an archive that cannot be read, and for one with an unsafe member: an
        absolute name, one with ``..``, or a wanted one that is not a regular file.
    """
    if source.is_dir():
        for path in _wanted_files(archive, source):
            with path.open("rb") as stream:
                yield archive.match(path.relative_to(source).as_posix()), Member(stream, source)
        return
    try:
        with tarfile.open(source, "r|*") as opened:
            for member in opened:
                if found := _wanted_member(archive, source, member):
                    yield found, Member(opened.extractfile(member), source)
    except UNREADABLE as why:
        raise _damaged(source, why) from None


def _damaged(source: Path, why: Exception) -> UserError:
    return UserError(f"{source} cannot be unpacked ({why}): fetch it again.")


def _wanted_member(archive: Archive, source: Path, member: tarfile.TarInfo) -> re.Match[str] | None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    found = archive.match(member.name)
    if path.is_absolute() or ".." in path.parts or (found and not member.isfile()):
        raise UserError(
            f"{source} is refused: its member {member.name!r} is not a regular file below the "
            "archive's own folder, so fetch the archive from its publisher again."
        )
    return found


def _wanted_files(archive: Archive, folder: Path) -> Iterator[Path]:
    """Yield the wanted regular files below ``folder``, sorted; links are left out."""
    for path in sorted(folder.rglob("*")):
        known = archive.match(path.relative_to(folder).as_posix())
        if known and path.is_file() and not path.is_symlink():
            yield path


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == GZIP
