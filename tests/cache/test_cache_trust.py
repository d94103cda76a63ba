"""Whose bytes are read: owners and modes of directories, entries, bundles and tuned values."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fkjit import tuning
from fkjit.cache import trust
from fkjit.cache.file import decode, encode, write_atomically
from fkjit.cache.lookup import Cache, default_cache
from fkjit.cli import doctor
from fkjit.errors import CacheError, TuningError
from fkjit.settings import settings
from tests.cache.kit import (
    AS_ROOT,
    IMAGE,
    KEY,
    NOBODY,
    Build,
    child,
    filled,
    get,
    normal_log,  # noqa: F401  (autouse)
    opened,
    the_file,
)

needs_root = pytest.mark.skipif(not AS_ROOT, reason="only root can give a file to another user")


@pytest.fixture
def environment(monkeypatch):
    """Set FKJIT_* variables for one test."""

    def use(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for known in (settings, default_cache):
            known.cache_clear()
        tuning.forget()

    yield use
    monkeypatch.undo()
    use()


def plant(directory: Path) -> None:
    """Another image under the usual key, with a right checksum."""
    get(Cache(directory))
    path = the_file(directory)
    path.write_bytes(encode(decode(path.read_bytes()).meta, b"planted"))


def foreign(path: Path) -> None:
    os.lchown(path, NOBODY, NOBODY)


# ---- what fkjit makes


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        get(Cache(tmp_path / "a" / "v1"))
        write_atomically(tmp_path / "tuning" / "gpu.json", b"{}")
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_file()} == {0o600}
    assert get(Cache(tmp_path / "a" / "v1")).origin == "disk"


def test_a_bundle_can_be_read_but_not_written_by_others(tmp_path):
    before = os.umask(0)
    try:
        filled(tmp_path / "v1").export(tmp_path / "b.fkb")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b.fkb").stat().st_mode) == 0o644


# ---- directories


def refuse(directory: Path, capsys) -> str:
    """The planted entry must not come; the one line that says why."""
    capsys.readouterr()
    build = Build()
    entry = get(Cache(directory), build)
    assert (entry.image, entry.origin, build.calls) == (IMAGE, "compiled", 1)
    [line] = capsys.readouterr().err.splitlines()
    return line


@needs_root
def test_a_directory_of_another_user_is_not_read(tmp_path, capsys):
    plant(tmp_path / "v1")
    foreign(tmp_path / "v1")
    assert f"{tmp_path}/v1 belongs to uid {NOBODY}, not to you" in refuse(tmp_path / "v1", capsys)
    assert decode(the_file(tmp_path / "v1").read_bytes()).image == b"planted"  # nor written


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_directory_that_others_can_write_is_not_read(tmp_path, capsys, mode):
    plant(tmp_path / "v1")
    (tmp_path / "v1").chmod(mode)
    whom = "everybody" if mode & 2 else "its group"
    assert f"v1 can be written by {whom} (mode {mode:04o})" in refuse(tmp_path / "v1", capsys)


def test_a_folder_above_counts_as_well_unless_nobody_gets_that_far(tmp_path):
    place = tmp_path / "shared" / "mine"
    plant(place)
    (tmp_path / "shared").chmod(0o777)
    assert trust.objection(place) is None  # tmp_path is ours alone
    with opened(tmp_path):
        assert "shared can be written by everybody" in str(trust.objection(place))
        (tmp_path / "shared").chmod(0o1777)
        assert trust.objection(place) is None  # what is ours in there stays ours
        assert trust.objection(tmp_path / "shared" / "later") is None


@needs_root
def test_a_link_of_another_user_is_not_followed(tmp_path):
    plant(tmp_path / "v1")
    (tmp_path / "link").symlink_to("v1")
    with opened(tmp_path):
        assert trust.objection(tmp_path / "link") is None
        foreign(tmp_path / "link")
        assert "link belongs to" in str(trust.objection(tmp_path / "link"))


def test_a_directory_of_roots_is_read_by_others_and_not_the_other_way_round(tmp_path, monkeypatch):
    status = tmp_path.stat()
    monkeypatch.setattr(trust, "user", lambda: status.st_uid + 1)
    assert (trust._reason(status, True) is None) == (status.st_uid == 0)
    monkeypatch.setattr(trust, "user", lambda: None)  # Windows
    assert trust.objection(tmp_path) is None


# ---- entries


@needs_root
def test_an_entry_of_another_user_in_our_directory_is_set_aside(tmp_path, capsys):
    plant(tmp_path)
    foreign(the_file(tmp_path))
    assert f"it belongs to uid {NOBODY}" in refuse(tmp_path, capsys)
    assert get(Cache(tmp_path)).image == IMAGE


def test_an_entry_that_others_can_write_is_set_aside(tmp_path, capsys):
    plant(tmp_path)
    the_file(tmp_path).chmod(0o666)
    assert "it can be written by everybody" in refuse(tmp_path, capsys)


# ---- bundles


@pytest.mark.parametrize("kind", ["zip", "folder", "entry"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_a_bundle_that_others_could_have_made_is_not_read(tmp_path, capsys, kind, how):
    if how == "owner" and not AS_ROOT:
        pytest.skip("only root can give a file to another user")
    plant(tmp_path / "v1")
    Cache(tmp_path / "v1").export(tmp_path / "b.fkb")
    places = {"zip": tmp_path / "b.fkb", "folder": tmp_path / "v1"}
    bundle = places.get(kind, the_file(tmp_path / "v1"))
    assert get(Cache(None, [bundle])).image == b"planted"
    foreign(bundle) if how == "owner" else bundle.chmod(0o777)
    assert get(Cache(None, [bundle])).image == IMAGE
    err = capsys.readouterr().err
    assert "not read" in err and len(err.splitlines()) == 1
    report = None
    try:
        report = Cache(tmp_path / "mine").import_(bundle)
    except CacheError as error:
        assert "not read" in str(error)
    assert report is None or (report.imported == 0 and "not read" in report.refused[0][1])


# ---- what a setting names


@pytest.mark.parametrize("how", ["cache", "bundle"])
def test_what_a_setting_names_as_trusted_is_read(tmp_path, environment, capsys, how):
    plant(tmp_path / "v1")
    (tmp_path / "v1").chmod(0o777)
    the_file(tmp_path / "v1").chmod(0o666)
    name = {"cache": "FKJIT_CACHE_DIR", "bundle": "FKJIT_BUNDLE_PATH"}[how]
    other = {"cache": {}, "bundle": {"FKJIT_CACHE_DIR": str(tmp_path / "own")}}[how]
    folder = tmp_path if how == "cache" else tmp_path / "v1"
    environment(**{name: str(folder)}, **other)
    assert get(default_cache()).image == IMAGE
    assert capsys.readouterr().err.count("fkjit:") == 1
    other = {"cache": {}, "bundle": {"FKJIT_CACHE_DIR": str(tmp_path / "own2")}}[how]
    environment(**{name: f"trusted={folder}"}, **other)
    assert get(default_cache()).image == b"planted"
    assert capsys.readouterr().err == ""
    assert settings().trusts(folder / "below") and not settings().trusts(Path(f"{folder}2"))


def test_doctor_says_whose_bytes_are_not_read(tmp_path, environment):
    plant(tmp_path / "v1")
    Cache(tmp_path / "v1").export(tmp_path / "b.fkb")
    (tmp_path / "v1").chmod(0o777)
    (tmp_path / "b.fkb").chmod(0o666)
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "a.json").write_text("{}")
    (tmp_path / "tuning" / "a.json").chmod(0o666)
    environment(FKJIT_CACHE_DIR=str(tmp_path), FKJIT_BUNDLE_PATH=str(tmp_path / "b.fkb"))
    found = doctor.diagnose()
    text = "\n".join(found["problems"])
    assert f"cache: {tmp_path}/v1 is not used: {tmp_path}/v1 can be written by everybody" in text
    assert f"bundle {tmp_path}/b.fkb is not read" in text
    assert f"tuning: {tmp_path}/tuning/a.json" in text
    assert found["cache"]["trusted"] is False and found["ok"] is False


# ---- tuned values


def test_tuned_values_that_others_could_have_written_are_not_read(tmp_path, environment):
    path = tmp_path / "tuning" / "nvidia_h200.json"
    environment(FKJIT_CACHE_DIR=str(tmp_path))
    entry = {"kernel": "k", "capability": "9.0", "fixed": {}, "shape": {}, "choice": {}}
    tuning.store(path, "NVIDIA H200", [entry])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert tuning.read(path).gpu == "NVIDIA H200"
    path.chmod(0o666)
    with pytest.raises(TuningError, match=r"can be written by everybody.*trusted="):
        tuning.read(path)
    environment(FKJIT_CACHE_DIR=f"trusted={tmp_path}")
    assert tuning.read(path).entries


def test_a_deep_or_huge_file_of_tuned_values_is_a_tuning_error(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 200_000)
    with pytest.raises(TuningError, match=r"a\.json is not a file of tuned values"):
        tuning.read(path)
    os.truncate(path, 1 << 33)
    with pytest.raises(TuningError, match=r"claims 8589934592 bytes"):
        tuning.read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TuningError, match="not a regular file"):
        tuning.read(path)


def test_a_home_that_is_not_there_leaves_nothing_in_the_working_directory(tmp_path):
    if not AS_ROOT:
        pytest.skip("only root can become a user without an entry in /etc/passwd")
    body = f"""
    from fkjit.jit import toolchain
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
    os.chdir(PLACE)
    toolchain._find_folder()
    print(os.listdir("."), "CUPY_CACHE_DIR" in os.environ)
    """
    place = tmp_path / "cwd"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    with opened(tmp_path):
        out, _ = child(body, place, env={"HOME": None, "XDG_CACHE_HOME": None})
    assert out == ["[]", "True"]


def test_the_key_is_the_one_that_is_planted(tmp_path):
    """What these tests plant would run, were it read: else they showed nothing."""
    plant(tmp_path)
    assert get(Cache(tmp_path)).image == b"planted"
    assert decode(the_file(tmp_path).read_bytes(), KEY)
