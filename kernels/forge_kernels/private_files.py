"""Checks of folders and files with executable content: only this user or root may change them.

Compiled kernels and XLA's executables are loaded into this process. Any user who can write them, or
replace their folder, can run code as this user.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_LINKS = 40  # on the path to a folder, as in the kernel
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def private_folder_fault(folder: Path) -> str | None:
    """Create the folder if needed; return why it cannot be used, with the remedy, or None.

    This user must own it, and no other user may write to it or replace it.
    """
    try:
        make_private_folder(folder)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid != os.getuid():
        return "belongs to another user: choose a folder that you own"
    fault = foreign_write_fault(folder)
    if fault is None and not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written to: chmod 700 it, or choose another folder"
    return fault


def make_private_folder(folder: Path) -> None:
    """Create the folder and its missing parents, accessible to this user only.

    Raises:
      OSError: it cannot be created, or is not a folder.
    """
    for path in (*reversed(folder.parents), folder):
        if not path.exists() or path == folder:
            path.mkdir(mode=0o700, exist_ok=True)


def foreign_write_fault(folder: Path) -> str | None:
    """Return who else can write to an existing folder or replace it, with the remedy, or None.

    Every folder on the path is checked, because its owner and everyone who can write to it can
    rename its entries. A sticky bit prevents the latter. The root of a container's volume may be
    open to all, as Kubernetes makes it, because only that container reaches it. Access control
    lists are not read.
    """
    try:
        status = folder.stat()
        if status.st_uid not in _trusted():
            return "belongs to another user: choose a folder that you own"
        if status.st_mode & 0o022:
            return "others can write to it: chmod 700 it, or choose another folder"
        for path, found in _way_to(folder):
            if found.st_uid not in _trusted():
                return f"{path} on its path belongs to another user: choose another folder"
            if _others_rename(found) and not _is_container_volume(path):
                return (
                    f"others can write to {path}, which contains it: chmod go-w that, or choose "
                    "another folder"
                )
    except OSError as error:
        return error.strerror or str(error)
    return None


def file_fault(status: os.stat_result) -> str | None:
    """Return why a file cannot be trusted as this user's own, or None.

    Args:
      status: the status of an open descriptor, or from `lstat`.
    """
    if not stat.S_ISREG(status.st_mode):
        return "it is not an ordinary file"
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if _others_write(status):
        return "others can write to it"
    return None


def open_private(file: Path) -> int:
    """Open a file that only this user or root can write, and return its descriptor.

    Raises:
      FileNotFoundError: the file does not exist.
      PermissionError: another user owns it or can write it, or it is a link or not a regular file.
      OSError: it cannot be opened.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    fault = file_fault(os.fstat(descriptor))
    if fault is not None:
        os.close(descriptor)
        raise PermissionError(f"{file} is not loaded: {fault}")
    return descriptor


def _way_to(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and links on a path, resolved as the kernel does, without its last part."""
    rest = list(Path(os.path.abspath(folder)).parts[1:])[::-1]
    at, links = Path("/"), 0
    yield at, at.lstat()
    while rest:
        part = rest.pop()
        at = at.parent if part == ".." else at / part
        found = at.lstat()
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"more than {MAX_LINKS} links lead to {folder}")
            yield at, found
            target = Path(os.readlink(at))
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
        elif rest:
            yield at, found


def _others_rename(status: os.stat_result) -> bool:
    sticky = status.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(status.st_mode) and not sticky and _others_write(status)


def _is_container_volume(folder: Path) -> bool:
    contained = "KUBERNETES_SERVICE_HOST" in os.environ or any(
        mark.exists() for mark in CONTAINER_MARKS
    )
    return contained and os.path.ismount(folder)


def _others_write(status: os.stat_result) -> bool:
    """Return True if another account may write; a group without other members does not count."""
    if status.st_mode & 0o002:
        return True
    return bool(status.st_mode & 0o020) and _has_others(status.st_gid, os.getuid())


@functools.cache
def _has_others(group: int, me: int) -> bool:
    if any(each.pw_gid == group and each.pw_uid not in (0, me) for each in pwd.getpwall()):
        return True
    try:
        members = grp.getgrgid(group).gr_mem
    except KeyError:  # a group without accounts, as of a container's volume
        return False
    own = {each.pw_name for each in pwd.getpwall() if each.pw_uid in (0, me)}
    return not own.issuperset(members)


def _trusted() -> frozenset[int]:
    """Return the ids of this user and of root, who can change everything anyway."""
    trusted = {0, os.getuid()}
    try:
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(int(first) > 0 for first, _, _ in maps):  # a user namespace without root
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    except (OSError, ValueError):
        pass
    return frozenset(trusted)
