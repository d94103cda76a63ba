"""What a path may do: whose bytes are read, and the modes of what fkjit makes. docs/SECURITY.md.

A compiled kernel or a tuned value is trusted as code is. So nothing is read that another user than
root could have put there, unless a setting names it as trusted (`trusted=` in FKJIT_CACHE_DIR or
FKJIT_BUNDLE_PATH). Nothing here raises but `require` and `require_file`, a CacheError.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fkjit.errors import CacheError
from fkjit.settings import TRUSTED, settings

FOLDER_MODE, FILE_MODE = 0o700, 0o600  # of what fkjit makes for itself, whatever the umask
_OTHERS_WRITE, _OTHERS_ENTER = 0o022, 0o011
_LINKS = 40  # on one path, as Linux has it


def user() -> int | None:
    """Who we are; None on a system without such numbers, where nothing is refused."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def objection(path: Path) -> str | None:
    """Who else could have put something at `path`, in words; None if nobody could.

    A path that does not exist is judged by the folders above it.
    """
    if user() is None or settings().trusts(path):
        return None
    way, shield = list(_way(path)), None
    for index, (place, status) in enumerate(way):
        last = index == len(way) - 1 and place == os.path.realpath(path)
        if shield is None or not place.startswith(shield) or last:
            reason = _reason(status, last)
            if reason is not None:
                return f"{place} {reason}"
        if _shields(status):
            shield = place.rstrip(os.sep) + os.sep
    return None


def require(path: Path) -> None:
    """CacheError, with what mends it, if somebody else could have put something at `path`."""
    reason = objection(path)
    if reason is not None:
        raise CacheError(f"{path} is not read: {reason}; {remedy(path)}")


def require_file(path: Path, status: os.stat_result) -> None:
    """The same of a file that is open."""
    reason = None if user() is None else _reason(status, True)
    if reason is not None and not settings().trusts(path):
        raise CacheError(f"not read: it {reason}")


def remedy(path: Path) -> str:
    """What to do about an objection."""
    return (
        "take it over (chown) and keep others from writing it (chmod go-w), or write "
        f"{TRUSTED}{path} in the setting that names it (docs/SECURITY.md)"
    )


def _way(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder, link and file that opening `path` goes through, as far as it can be seen."""
    at, links = os.sep, 0
    with suppress(OSError, ValueError):
        rest = os.path.abspath(path).split(os.sep)[::-1]
        yield at, os.lstat(at)
        while rest:
            part = rest.pop()
            if part in ("", os.curdir, os.pardir):
                at = os.path.dirname(at) if part == os.pardir else at
                continue
            here = os.path.join(at, part)
            status = os.lstat(here)
            yield here, status
            if not stat.S_ISLNK(status.st_mode):
                at = here
                continue
            links += 1
            if links > _LINKS:
                return
            aim = os.readlink(here)
            at = os.sep if os.path.isabs(aim) else at
            rest += aim.split(os.sep)[::-1]


def _reason(status: os.stat_result, last: bool) -> str | None:
    """What is wrong with one step of a way; the last one has no excuse but the sticky bit."""
    if status.st_uid not in (0, user()):
        return f"belongs to {_name(status.st_uid)}, not to you or root"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or not mode & _OTHERS_WRITE or not (last or stat.S_ISDIR(mode)):
        return None
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:  # what is in it belongs to whoever made it
        return None
    if not last and not mode & stat.S_IWOTH and _alone_in(status.st_gid):
        return None
    whom = "everybody" if mode & stat.S_IWOTH else "its group"
    return f"can be written by {whom} (mode {stat.S_IMODE(mode):04o})"


def _shields(status: os.stat_result) -> bool:
    """A folder of ours that nobody else gets through: what is below it is out of their reach."""
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid in (0, user())
        and not status.st_mode & (_OTHERS_WRITE | _OTHERS_ENTER)
    )


def _alone_in(gid: int) -> bool:
    """Whether a group is this user's own, as systems with an umask of 002 make them."""
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        us, group = pwd.getpwuid(user() or 0), grp.getgrgid(gid)
        return us.pw_gid == gid and group.gr_name == us.pw_name and not {*group.gr_mem} - {us[0]}
    return False


def _name(uid: int) -> str:
    with suppress(ImportError, KeyError):
        import pwd

        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


def make_folders(path: Path) -> None:
    """Make `path` and what is missing above it, each 0700. OSError where that cannot be done."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process was first
            os.mkdir(folder, FOLDER_MODE)
            os.chmod(folder, FOLDER_MODE)  # an umask may have taken our own rights
