"""Downloading published weights, with a file in the server's part."""

from __future__ import annotations

import functools
import pathlib

import keras
import pytest

from bnzoo.pretrained import download, fetch


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The file behind the URL; Keras' cache is a new folder beside it."""
    served = tmp_path / "inception_v2_2016_08_28.tar.gz"
    served.write_bytes(b"weights")
    monkeypatch.setattr(download, "RELEASED", {"slim": download.Released(served.as_uri(), 7)})
    (tmp_path / "cache").mkdir()
    get_file = functools.partial(keras.utils.get_file, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(keras.utils, "get_file", get_file)
    return served


def test_a_file_is_downloaded_once(served):
    path = pathlib.Path(fetch("slim"))
    assert path.read_bytes() == b"weights"
    assert path.parent == served.parent / "cache" / "models"
    served.unlink()
    assert fetch("slim") == str(path)


def test_without_a_network_the_message_says_so(served):
    served.unlink()
    with pytest.raises(
        OSError,
        match=r"^the weights 'slim' are not in Keras' cache and cannot be downloaded from file:///"
        r".*tar\.gz: .*No such file.*Without a network, give the path of the file instead$",
    ):
        fetch("slim")


def test_an_incomplete_file_does_not_stay_in_the_cache(served):
    served.write_bytes(b"weig")
    with pytest.raises(
        OSError, match=r"came incomplete from .*: 4 bytes instead of 7\. Try again$"
    ):
        fetch("slim")
    served.write_bytes(b"weights")
    assert pathlib.Path(fetch("slim")).read_bytes() == b"weights"


def test_what_is_released():
    url, size = download.RELEASED["slim"]
    assert url == "http://download.tensorflow.org/models/inception_v2_2016_08_28.tar.gz"
    assert size == 41_577_079


def test_weights_that_nobody_serves():
    with pytest.raises(ValueError, match=r"must be one of 'slim' to be downloaded\. .*'torch'$"):
        fetch("torch")
