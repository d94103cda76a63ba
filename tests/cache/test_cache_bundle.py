"""Bundles, FKJIT_REQUIRE_CACHED, and images as files."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from fkjit.cache import entry as cache_entry
from fkjit.cache.file import cache_key, decode, stored_fields
from fkjit.cache.lookup import Cache, Entry, materialise
from fkjit.errors import CacheError, NotCachedError
from tests.cache.kit import IMAGE, Build, fields, filled, forbidden, get

# ---- bundles


def test_a_bundle_is_deterministic_and_a_plain_zip(tmp_path):
    cache = filled(tmp_path / "v1")
    one, two = cache.export(tmp_path / "1.fkb"), cache.export(tmp_path / "2.fkb")
    assert (one.entries, one.refused) == (2, ())
    assert one.path.read_bytes() == two.path.read_bytes()
    with zipfile.ZipFile(one.path) as archive:
        assert {item.compress_type for item in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.testzip() is None
        for name in archive.namelist():
            assert decode(archive.read(name), name.removesuffix(".fkc")).image == IMAGE
    assert not list(tmp_path.glob("*.tmp"))


def test_export_of_chosen_keys_and_of_what_no_directory_holds(tmp_path):
    cache = filled(tmp_path / "v1")
    key = cache_key(stored_fields(fields(target="sm_90a")))
    assert cache.export(tmp_path / "one.fkb", [key]).entries == 1
    with pytest.raises(CacheError, match=r"entry 0000.*in no cache layer"):
        cache.export(tmp_path / "none.fkb", ["0" * 64])
    assert not (tmp_path / "none.fkb").exists()
    memory = Cache(None)
    memory.get_or_build(fields(), Build(), describe="a")
    assert memory.export(tmp_path / "memory.fkb").entries == 1
    assert Cache(None, [tmp_path / "memory.fkb"]).get_or_build(fields(), forbidden, describe="")


def test_import_counts(tmp_path):
    filled(tmp_path / "a").export(tmp_path / "b.fkb")
    cache = filled(tmp_path / "c", ("sm_80",))
    report = cache.import_(tmp_path / "b.fkb")
    assert (report.imported, report.present, report.refused) == (1, 1, ())
    assert cache.import_(tmp_path / "b.fkb").present == 2
    assert cache.get_or_build(fields(target="sm_90a"), forbidden, describe="").origin == "disk"


def test_import_refuses_bad_entries_and_says_why(tmp_path):
    filled(tmp_path / "a")
    good = sorted((tmp_path / "a").rglob("*.fkc"))
    data = bytearray(good[0].read_bytes())
    data[-1] ^= 1
    with zipfile.ZipFile(tmp_path / "b.fkb", "w") as archive:
        archive.writestr(good[0].name, bytes(data))
        archive.writestr("../../" + "e" * 64 + ".fkc", good[1].read_bytes())
        archive.writestr("README", "hello")
    report = Cache(tmp_path / "c").import_(tmp_path / "b.fkb")
    assert report.imported == report.present == 0
    reasons = dict(report.refused)
    assert reasons[good[0].stem] == "checksum mismatch"
    assert "not eeee" in reasons["e" * 64]
    assert not list(tmp_path.rglob("e" * 64 + "*"))


def test_import_of_something_else(tmp_path):
    (tmp_path / "text.fkb").write_text("hello")
    for path in (tmp_path / "text.fkb", tmp_path / "missing.fkb", tmp_path / "missing"):
        with pytest.raises(CacheError, match=r"cache import: .*not a readable bundle"):
            Cache(tmp_path / "c").import_(path)
    with pytest.raises(CacheError, match="FKJIT_CACHE_DIR"):
        Cache(None).import_(tmp_path / "text.fkb")


@pytest.mark.parametrize("kind", ["zip", "deflated", "root", "sharded", "flat", "single"])
def test_every_kind_of_bundle_is_read_and_imported(tmp_path, kind):
    source = filled(tmp_path / "root" / "v1", ("sm_80",))
    file = next((tmp_path / "root").rglob("*.fkc"))
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / file.name).write_bytes(file.read_bytes())
    source.export(tmp_path / "zip.fkb")
    with zipfile.ZipFile(tmp_path / "deflated.fkb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "some/folder/" + file.name)
    places = {"zip": "zip.fkb", "deflated": "deflated.fkb", "sharded": "root/v1"}
    bundle = file if kind == "single" else tmp_path / places.get(kind, kind)
    cache = Cache(tmp_path / "v1", [bundle], require_cached=True)
    entry = cache.get_or_build(fields(), forbidden, describe="")
    assert (entry.origin, entry.image) == ("bundle", IMAGE)
    assert not (tmp_path / "v1").exists()
    assert [info.origin for info in cache.entries(bundles=True)] == ["bundle"]
    assert list(cache.entries()) == []
    assert cache.import_(bundle).imported == 1
    assert Cache(tmp_path / "v1").get_or_build(fields(), forbidden, describe="").origin == "disk"


def test_a_bundle_replaced_while_open_is_read_anew(tmp_path):
    filled(tmp_path / "a", ("sm_80",)).export(tmp_path / "b.fkb")
    cache = Cache(None, [tmp_path / "b.fkb"])
    assert cache.get_or_build(fields(), forbidden, describe="").origin == "bundle"
    filled(tmp_path / "c", ("sm_86", "sm_89", "sm_80")).export(tmp_path / "b.fkb")
    assert cache.get_or_build(fields(target="sm_89"), forbidden, describe="").origin == "bundle"


def test_the_users_directory_comes_before_bundles(tmp_path):
    filled(tmp_path / "a", ("sm_80",)).export(tmp_path / "b.fkb")
    cache = Cache(tmp_path / "a", [tmp_path / "b.fkb"])
    assert cache.get_or_build(fields(), forbidden, describe="").origin == "disk"


# ---- FKJIT_REQUIRE_CACHED


HERE, THERE = {"nvrtc": "13.5 aa", "cuda_headers": "13.5 b"}, {"nvrtc": "13.0 cc"}


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_a_bundle_of_another_minor_version_is_taken_where_that_is_asked_for(tmp_path, kind):
    made = Cache(tmp_path / "there" / "v1")
    image = b"\x7fELF of 13.0"
    get(made, Build(image), fields(**THERE, cuda_headers="13.0 d"))
    bundle = tmp_path / "there"
    if kind == "zip":
        bundle = tmp_path / "b.fkb"
        made.export(bundle)
    wanted = fields(**HERE)
    with pytest.raises(NotCachedError, match=r"differs in cuda_headers .*nvrtc"):
        get(Cache(None, [bundle], require_cached=True), fields=wanted)
    accepts = Cache(tmp_path / "here", [Path("compatible"), bundle], require_cached=True)
    found = get(accepts, fields=wanted)
    assert (found.origin, found.image, found.meta["fields"]["nvrtc"]) == (
        "bundle", image, "13.0 cc",
    )  # fmt: skip
    assert get(accepts, fields=wanted).origin == "memory"
    assert [one.path for one in accepts.bundles] == [bundle]
    for other in ({"nvrtc": "12.9 x"}, {"target": "sm_90a"}, {"text": "another"}):
        with pytest.raises(NotCachedError):
            get(accepts, fields=fields(**{**HERE, **other}))


def test_ptx_of_another_version_is_never_taken(tmp_path):
    get(Cache(tmp_path / "v1"), fields=fields(**THERE, target="compute_80"))
    accepts = Cache(None, [Path("compatible"), tmp_path], require_cached=True)
    with pytest.raises(NotCachedError):
        get(accepts, fields=fields(**HERE, target="compute_80"))
    assert get(accepts, fields=fields(**THERE, target="compute_80")).origin == "bundle"


def test_require_cached_names_the_field_that_differs(tmp_path):
    filled(tmp_path)
    Cache(tmp_path).get_or_build(fields(kernel="gemm.tiled"), Build(), describe="gemm.tiled")
    strict = Cache(tmp_path, require_cached=True)
    assert strict.get_or_build(fields(), forbidden, describe="").origin == "disk"
    with pytest.raises(NotCachedError) as caught:
        strict.get_or_build(fields(target="sm_86"), forbidden, describe="norm.rms sm_86")
    message = str(caught.value)
    assert "FKJIT_REQUIRE_CACHED=1: norm.rms sm_86 is in no cache layer" in message
    assert "differs in target ('sm_86' here, 'sm_" in message
    assert "text" not in message.split("differs in")[1].split(";")[0]
    with pytest.raises(NotCachedError, match=r"differs in text \(text:[0-9a-f]+… here, text:"):
        strict.get_or_build(fields(text="z" * 9000), forbidden, describe="norm.rms sm_80")
    with pytest.raises(NotCachedError, match=r"differs in nvrtc \('13' here, absent there\)"):
        strict.get_or_build(fields(nvrtc="13"), forbidden, describe="norm.rms sm_80")


def test_require_cached_takes_json_fields_apart(tmp_path):
    def values(block: int, causal: bool) -> dict[str, str | bytes]:
        return fields(values=json.dumps({"block": block, "causal": causal, "head_dim": 128}))

    for block, causal in ((64, False), (128, True)):
        Cache(tmp_path).get_or_build(values(block, causal), Build(), describe="norm.rms")
    strict = Cache(tmp_path, require_cached=True)
    with pytest.raises(
        NotCachedError, match=r"differs in values\.block \('32' here, '128' there\);"
    ):
        strict.get_or_build(values(32, True), forbidden, describe="norm.rms")


def test_require_cached_prefers_the_same_kernel_as_the_nearest(tmp_path):
    cache = Cache(tmp_path)
    cache.get_or_build(fields(nvrtc="1", headers="1"), Build(), describe="norm.rms")
    cache.get_or_build(fields(kernel="k", text="other"), Build(), describe="k")
    strict = Cache(tmp_path, require_cached=True)
    with pytest.raises(NotCachedError, match=r"\(norm\.rms, disk\), differs in headers .*, nvrtc"):
        strict.get_or_build(fields(nvrtc="2", headers="2"), forbidden, describe="norm.rms")


def test_require_cached_with_nothing_anywhere(tmp_path):
    strict = Cache(tmp_path / "none", [tmp_path / "b.fkb"], require_cached=True)
    with pytest.raises(NotCachedError, match=r"none \(does not exist\), .*b\.fkb \(does not exist"):
        strict.get_or_build(fields(), forbidden, describe="norm.rms")


# ---- an image as a file


def some_entry() -> Entry:
    return Cache(None).get_or_build(fields(), Build(), describe="norm.rms")


def test_materialise_is_the_image_alone_and_goes_away():
    with materialise(some_entry()) as path:
        assert path.read_bytes() == IMAGE
        assert path.suffix == ".cubin"
    assert not path.exists()


@pytest.mark.parametrize(
    ("folders", "where"),
    [
        (("/proc/none", "/dev/shm"), "/dev/shm/fkjit-"),
        (("/proc/none", "/etc/hostname"), "/proc/self/fd/"),
    ],
)
def test_materialise_where_temporary_files_fail(monkeypatch, folders, where):
    monkeypatch.setattr(cache_entry, "_FOLDERS", folders)
    with materialise(some_entry()) as path:
        assert str(path).startswith(where)
        assert path.read_bytes() == IMAGE
    assert not path.exists()


def test_materialise_on_a_full_temporary_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_entry, "_FOLDERS", (str(tmp_path), "/dev/shm"))
    write = cache_entry.write_all

    def full_once(descriptor: int, data: bytes) -> None:
        monkeypatch.setattr(cache_entry, "write_all", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_entry, "write_all", full_once)
    with materialise(some_entry()) as path:
        assert path.read_bytes() == IMAGE
        assert path.parent == Path("/dev/shm")
    assert list(tmp_path.iterdir()) == []


def test_no_two_materialised_paths_are_the_same(monkeypatch):
    entry, paths = some_entry(), []
    for folders in ((None, "/dev/shm"), ("/proc/none",)):
        monkeypatch.setattr(cache_entry, "_FOLDERS", folders)
        for _ in range(20):
            with materialise(entry) as path:
                assert path.read_bytes() == IMAGE
                paths.append(str(path))
    assert len(set(paths)) == 40
    assert len({path.rsplit("/", 1)[1] for path in paths[20:]}) == 1  # one descriptor, used again


def test_materialise_with_no_place_at_all_says_so(monkeypatch):
    monkeypatch.setattr(cache_entry, "_FOLDERS", ("/proc/none",))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(CacheError, match=r"no place for the 10244 bytes of norm\.rms"):
        materialise(some_entry()).__enter__()
