"""Archives of models (``from_pretrained``)."""

import tarfile
from pathlib import PurePosixPath
from types import SimpleNamespace

from fairseq import file_utils


def refuse_unsafe_archives() -> None:
    """Refuse archives that could write outside the folder that they are extracted to.

    Break: ``from_pretrained`` of an archive calls ``file_utils.load_archive_file``, which extracts
    with ``extractall`` and no filter: a member ``../x`` or a link writes anywhere. It then moves
    the common prefix of all names into place, so an archive whose members begin with ``/home``
    moves that folder. Only regular files and folders with relative names are accepted.
    """
    if file_utils.tarfile is tarfile:
        file_utils.tarfile = SimpleNamespace(open=open_checked_archive)


def open_checked_archive(name: str, mode: str = "r") -> tarfile.TarFile:
    """Open a tar archive whose members are regular files and folders with relative names.

    Raises: tarfile.ReadError, one sentence, for any other member.
    """
    with tarfile.open(name, mode) as archive:
        for member in archive:
            _check_member(name, member)
    return tarfile.open(name, mode)


def _check_member(archive: str, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    inside = not path.is_absolute() and ".." not in path.parts
    # a link is refused wherever it points: a later member may be written through it
    if not inside or not (member.isfile() or member.isdir()):
        raise tarfile.ReadError(
            f"{archive} is refused: its member {member.name!r} is not a regular file or folder "
            "below the archive's own folder, so extracting it could write elsewhere"
        )
