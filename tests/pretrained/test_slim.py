"""TF-slim's Inception V2, as tf_slim itself builds it, runs it and saves it."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.models import feature_extractor
from bnzoo.pretrained import from_checkpoint, read_checkpoint
from tests.pretrained.seeded import largest_difference, seeded_images, seeded_tensors

MODULES = {
    "inception_3a": "Mixed_3b",
    "inception_3b": "Mixed_3c",
    "inception_3c": "Mixed_4a",
    "inception_4a": "Mixed_4b",
    "inception_4b": "Mixed_4c",
    "inception_4c": "Mixed_4d",
    "inception_4d": "Mixed_4e",
    "inception_4e": "Mixed_5a",
    "inception_5a": "Mixed_5b",
    "inception_5b": "Mixed_5c",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Their endpoints on `seeded_images()`, their variables' values, and a folder of checkpoints.

    The first format of checkpoints, of one file, is that of the released archive.
    """
    with pytest.MonkeyPatch.context() as patch:
        # tf_slim 1.1 is older than TensorFlow 2.21, which has its Tensor elsewhere.
        from tensorflow.python.framework import ops

        patch.setattr(ops, "Tensor", tf.Tensor, raising=False)
        slim = pytest.importorskip("tf_slim")
        from tf_slim.nets import inception_v2

        # Updates in place: the default needs a part of Keras that TensorFlow no longer has.
        batch_norm = {"decay": 0.9997, "epsilon": 0.001, "updates_collections": None}
        scope = inception_v2.inception_v2_arg_scope()
        with (
            tf.Graph().as_default(),
            slim.arg_scope(scope),
            slim.arg_scope([slim.conv2d], normalizer_params=batch_norm),
        ):
            _, endpoints = inception_v2.inception_v2(
                tf.constant(seeded_images()), num_classes=1001, is_training=False
            )
            variables = {v.op.name: v for v in tf.compat.v1.global_variables()}
            values = seeded_tensors({name: v.shape for name, v in variables.items()}, out_axis=-1)
            counts = (
                len(variables),
                sum(value.size for value in values.values()),
                sum(np.prod(v.shape) for v in tf.compat.v1.trainable_variables()),
            )
            folder = tmp_path_factory.mktemp("slim")
            with tf.compat.v1.Session() as session:
                for name, variable in variables.items():
                    variable.load(values[name], session)
                for version in (1, 2):
                    tf.compat.v1.train.Saver(write_version=version).save(
                        session, str(folder / f"inception_v{version}.ckpt"), write_meta_graph=False
                    )
                found = session.run(endpoints)
    return found, values, folder, counts


@pytest.fixture(scope="module")
def model(source):
    return from_checkpoint(source[2] / "inception_v1.ckpt", "slim", classifier_activation=None)


@pytest.mark.peers
def test_every_module_and_the_logits_are_those_of_the_source(source, model):
    images = seeded_images()
    endpoints = source[0]
    found = feature_extractor(model, list(MODULES))(images)
    for ours, theirs in MODULES.items():
        # float32: about 1e-6 for each rounding, over up to 69 layers.
        assert largest_difference(found[ours].numpy(), endpoints[theirs]) < 1e-4, ours
    assert largest_difference(model(images).numpy(), endpoints["Logits"]) < 1e-4


@pytest.mark.peers
def test_counts(source, model):
    assert source[3] == (277, 11_199_137, 11_179_361)
    trainable = sum(np.prod(variable.shape) for variable in model.trainable_variables)
    assert (len(model.weights), model.count_params(), trainable) == source[3]


@pytest.mark.peers
def test_files_of_both_formats_and_the_archive_of_one_hold_the_same(source, tmp_path):
    _, values, folder, _ = source
    with tarfile.open(tmp_path / "inception.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(folder / "inception_v1.ckpt", "models/inception_v2.ckpt")
    for path in (folder / "inception_v2.ckpt", tmp_path / "inception.tar.gz"):
        found = read_checkpoint(path, source="slim").tensors
        assert found.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["inception_v1.ckpt", "inception_v2.ckpt.data-00000-of-00001"])
def test_a_file_that_is_cut_off(name, source, tmp_path):
    _, _, folder, _ = source
    for file in folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:-5000] if file.name == name else content)
    path = tmp_path / name.removesuffix(".data-00000-of-00001")
    with pytest.raises(ValueError, match="must be a TF-slim checkpoint of Inception V2, or a tar"):
        read_checkpoint(path, source="slim")


def tar(members):
    """A compressed archive of the given files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


NOISE = np.random.RandomState(0).bytes(20_000)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "checkpoint"),
        (NOISE, "not an sstable"),
        (tar({"README": b"none"}), "an archive of README: not one checkpoint"),
        (tar({"a.ckpt": b"1", "b.ckpt": b"2"}), "an archive of a.ckpt, b.ckpt: not one checkpoint"),
        (tar({"a.ckpt": NOISE}), "not an sstable"),
        (tar({"a.ckpt": NOISE})[:15_000], "a damaged archive: "),
    ],
)
def test_what_is_no_checkpoint(content, reason, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a TF-slim checkpoint.*Received: '.*file': .*{reason}"):
        read_checkpoint(tmp_path / "file", source="slim")


def test_a_member_of_an_archive_is_not_written_elsewhere(tmp_path):
    (tmp_path / "evil.tar.gz").write_bytes(tar({f"..{tmp_path}/../out.ckpt": NOISE}))
    with pytest.raises(ValueError, match="not an sstable"):
        read_checkpoint(tmp_path / "evil.tar.gz", source="slim")
    assert [file.name for file in tmp_path.iterdir()] == ["evil.tar.gz"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"Received: '.*none.ckpt': .*Failed to find any matching"):
        read_checkpoint(tmp_path / "none.ckpt", source="slim")
