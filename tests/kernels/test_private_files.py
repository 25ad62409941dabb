"""Files whose content is executed: other users must not be able to write or replace them."""

import os
import stat
from pathlib import Path

import pytest

from forge_kernels import private_files
from forge_kernels.private_files import (
    foreign_write_fault,
    make_private_folder,
    open_private,
    private_folder_fault,
)

STRANGER = 54321  # a user and a group without an account


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "parent" / "cache"
    make_private_folder(made)
    return made


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path another user's: change its owner, or our identity if only root could do that."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


def test_new_folder_and_its_new_parents_are_private(tmp_path):
    before = os.umask(0)
    try:
        assert private_folder_fault(tmp_path / "a" / "b") is None
    finally:
        os.umask(before)
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_folder_writable_by_others_is_rejected(folder, mode):
    folder.chmod(mode)
    assert "others can write to it: chmod 700" in str(foreign_write_fault(folder))


def test_folder_of_another_user_is_rejected(folder, monkeypatch):
    give_away(folder, monkeypatch)
    assert "belongs to another user" in str(foreign_write_fault(folder))
    assert "belongs to another user" in str(private_folder_fault(folder))


def test_world_writable_parent_needs_a_sticky_bit(folder):
    folder.parent.chmod(0o777)
    fault = str(foreign_write_fault(folder))
    assert f"others can write to {folder.parent}, which contains it: chmod go-w" in fault
    folder.parent.chmod(0o1777)
    assert foreign_write_fault(folder) is None


def test_parent_of_another_user_is_rejected(folder, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    give_away(folder.parent, monkeypatch)
    folder.parent.chmod(0o755)
    assert f"{folder.parent} on its path belongs to another user" in str(
        foreign_write_fault(folder)
    )


def test_parents_group_counts_if_it_has_another_member(folder, monkeypatch):
    folder.parent.chmod(0o775)
    monkeypatch.setattr(private_files, "_has_others", lambda group, me: False)
    assert foreign_write_fault(folder) is None
    monkeypatch.setattr(private_files, "_has_others", lambda group, me: True)
    assert "others can write to" in str(foreign_write_fault(folder))


def test_group_without_other_members_is_private():
    assert not private_files._has_others(STRANGER, os.getuid())
    accounts = [account for account in private_files.pwd.getpwall() if account.pw_uid != 0]
    if accounts:
        assert private_files._has_others(accounts[0].pw_gid, STRANGER)


def test_links_in_the_path_are_followed_and_checked(tmp_path, folder):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "link").symlink_to("../parent/cache")
    assert foreign_write_fault(open_to_all / "link") is None
    open_to_all.chmod(0o777)  # the folder is private, but the link to it can be replaced
    assert f"others can write to {open_to_all}" in str(foreign_write_fault(open_to_all / "link"))


def test_container_volume_may_be_open_to_all(folder, monkeypatch):
    folder.parent.chmod(0o2777)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == folder.parent)
    monkeypatch.setattr(private_files, "CONTAINER_MARKS", ())
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "others can write to" in str(foreign_write_fault(folder))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert foreign_write_fault(folder) is None


def test_private_file_is_opened(folder):
    file = folder / "file"
    file.write_bytes(b"x")
    file.chmod(0o600)
    descriptor = open_private(file)
    assert os.read(descriptor, 2) == b"x"
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_private(folder / "none")


@pytest.mark.parametrize("kind", ["writable", "another user's", "link", "pipe", "folder"])
def test_file_that_is_not_private_is_not_opened(folder, monkeypatch, kind):
    file = folder / "file"
    match kind:
        case "link":
            (folder / "target").write_bytes(b"x")
            file.symlink_to("target")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            file.write_bytes(b"x")
            file.chmod(0o666 if kind == "writable" else 0o600)
    if kind == "another user's":
        give_away(file, monkeypatch)
    with pytest.raises(OSError):
        open_private(file)
