from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from export.errors import ExportFailed
from export.verification import served_version
from export.versions import choose_version, is_version, written_aside


def with_versions(out: Path, *names: str) -> Path:
    for name in names:
        (out / name).mkdir(parents=True)
    return out


@pytest.mark.parametrize("text", ["0", "1", "20261130", "999999999999999999"])
def test_is_version(text: str) -> None:
    assert is_version(text)


@pytest.mark.parametrize("text", ["", "-1", "+1", "01", "1.0", "v1", "latest", "9" * 19, "²"])
def test_is_no_version(text: str) -> None:
    assert not is_version(text)


def test_first_version_is_1(tmp_path: Path) -> None:
    assert choose_version(tmp_path / "new", None) == 1
    assert choose_version(tmp_path / "new", "next") == 1
    assert choose_version(tmp_path / "new", "7") == 7


def test_next_is_above_the_highest_and_other_names_do_not_count(tmp_path: Path) -> None:
    out = with_versions(tmp_path, "2", "10", "latest", ".11.writing-1")
    assert choose_version(out, "next") == 11
    assert choose_version(out, None) == 11
    assert choose_version(out, "3") == 3


def test_what_no_server_takes_for_a_version_does_not_count(tmp_path: Path) -> None:
    """TensorFlow Serving reads an int64."""
    out = with_versions(tmp_path, "00007", "9" * 20, str(2**63), "٣")
    assert choose_version(out, None) == 8
    for name in ("00007", "9" * 20):
        (out / name / "saved_model.pb").touch()
    assert served_version(out) == out / "00007"
    (out / str(2**63 - 1)).mkdir()
    with pytest.raises(ExportFailed, match=r"9223372036854775807 leaves no number"):
        choose_version(out, None)
    with pytest.raises(ExportFailed, match=r"9223372036854775807, the highest version$"):
        served_version(out)


def test_refuses_a_version_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match=r"2 exists already: .* --version=next, the default$"):
        choose_version(with_versions(tmp_path, "2"), "2")


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportFailed, match=r"file is no folder$"):
        choose_version(tmp_path / "file", None)


def test_no_number_is_left(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match=r"9 leaves no number for a next version$"):
        choose_version(with_versions(tmp_path, "9" * 18), None)


def test_nothing_has_a_versions_name_before_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "models" / "digits"
    with written_aside(out, "3") as aside:
        (aside.folder / "saved_model.pb").touch()
        assert [entry.name.isdecimal() for entry in out.iterdir()] == [False]
    assert [entry.name for entry in out.iterdir()] == ["3"]
    assert (out / "3" / "saved_model.pb").exists()
    # A server runs as another user.
    assert stat.S_IMODE((out / "3").stat().st_mode) == stat.S_IMODE(out.stat().st_mode)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write_and_stop() -> None:
        with written_aside(tmp_path, None) as aside:
            (aside.folder / "saved_model.pb").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert list(tmp_path.iterdir()) == []


def test_two_at_a_time_get_two_versions(tmp_path: Path) -> None:
    with written_aside(tmp_path, None) as first:
        with written_aside(tmp_path, None) as second:
            (second.folder / "second").touch()
            # Neither takes the other for a leftover.
            assert first.folder.exists()
        (first.folder / "first").touch()
    assert (first.version, second.version) == (2, 1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["1", "2", "first", "second"]


def test_two_of_one_number_end_in_one_line(tmp_path: Path) -> None:
    def write_what_is_there() -> None:
        with written_aside(tmp_path, "3") as aside:
            (aside.folder / "mine").touch()
            with_versions(tmp_path, "3/theirs")

    with pytest.raises(ExportFailed, match="3 exists already"):
        write_what_is_there()
    assert [path.name for path in (tmp_path / "3").iterdir()] == ["theirs"]


def test_leftovers_of_killed_writers_go_and_nothing_else(tmp_path: Path) -> None:
    killed = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from export.versions import written_aside\n"
        "with written_aside(Path(sys.argv[1]), None) as aside:\n"
        "    (aside.folder / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path), str(root)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".1.writing-")
    with_versions(tmp_path, ".cache", "notes")
    with written_aside(tmp_path, None):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "1", "notes"]


@pytest.mark.parametrize("after", [False, True], ids=["before it is open", "before it is locked"])
def test_a_new_folder_that_another_export_removes_is_made_again(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open
    removed = []

    def removed_first(path: Path, *flags: int, **other: int | None) -> int:
        first = not removed and ".writing-" in str(path)
        if first:
            removed.append(path)
        if first and not after:
            Path(path).rmdir()
        opened = opens(path, *flags, **other)  # type: ignore[arg-type]
        if first and after:
            Path(path).rmdir()
        return opened

    monkeypatch.setattr(os, "open", removed_first)
    with written_aside(tmp_path, None) as aside:
        assert aside.folder not in removed
        (aside.folder / "saved_model.pb").touch()
    assert len(removed) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["1", "saved_model.pb"]


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that loses power has the version or has it not, and never one of empty files."""
    done: list[str] = []
    syncs, renames = os.fsync, Path.rename

    def synced(opened: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{opened}"))
        syncs(opened)

    def renamed(self: Path, target: Path) -> Path:
        done.append("renamed")
        return renames(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with written_aside(tmp_path, None) as aside:
        (aside.folder / "assets").mkdir()
        (aside.folder / "assets" / "labels.txt").write_text("ant")
        folder = str(aside.folder)
    at = done.index("renamed")
    parts = {folder, f"{folder}/assets", f"{folder}/assets/labels.txt"}
    assert set(done[:at]) == parts
    # Its new name, too.
    assert done[at + 1 :] == [str(tmp_path)]
