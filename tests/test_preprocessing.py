"""bnzoo/preprocessing.py, against Pillow and NumPy."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from bnzoo.preprocessing import Preprocessing

PLAIN = Preprocessing(image_size=(20, 30), mean=0.0, scale=1.0)
GREY = Preprocessing(image_size=(20, 30), channels=1, mean=0.0, scale=1.0)


def _pixels(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    """Noise on a gradient, different in each channel."""
    random = np.random.default_rng(seed)
    ramp = np.linspace(0, 120, height)[:, None, None] + np.linspace(0, 60, width)[:, None]
    noise = random.integers(0, 40, (height, width, channels))
    return np.uint8(ramp + noise + 12 * np.arange(channels))


def _encoded(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(stream, kind, **options)
    return stream.getvalue()


def _pillow(contents: bytes, channels: int) -> np.ndarray:
    image = Image.open(io.BytesIO(contents)).convert("RGB" if channels == 3 else "L")
    return np.asarray(image).reshape(image.height, image.width, channels)


def _tagged(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


RGB = _pixels(20, 30, 3)
RGBA = np.concatenate([RGB, _pixels(20, 30, 1, seed=1)], axis=-1)
FILES = {
    "jpeg": _encoded(RGB, "JPEG"),
    "jpeg_444": _encoded(RGB, "JPEG", subsampling=0, quality=95),
    "jpeg_progressive": _encoded(RGB, "JPEG", progressive=True),
    "jpeg_grey": _encoded(RGB[..., 0], "JPEG"),
    "jpeg_exif": _encoded(RGB, "JPEG", exif=_tagged(6)),
    "png": _encoded(RGB, "PNG"),
    "png_alpha": _encoded(RGBA, "PNG"),
    "png_grey": _encoded(RGB[..., 0], "PNG"),
    "png_palette": _encoded(Image.fromarray(RGB).quantize(16), "PNG"),
    "png_bits": _encoded(Image.fromarray(RGB).convert("1"), "PNG"),
    "gif": _encoded(RGB, "GIF"),
    "gif_frames": _encoded(RGB, "GIF", save_all=True, append_images=[Image.fromarray(RGB[::-1])]),
    "webp": _encoded(RGB, "WEBP", lossless=True),
}
# Pillow rounds to integers after each of its two passes, half a level each.
PILLOW_ROUNDS = 1.0 + 1e-4
CMYK = _encoded(Image.new("RGB", (30, 20), (200, 40, 10)).convert("CMYK"), "JPEG")


@pytest.mark.parametrize("name", FILES)
def test_decode_gives_the_pixels_of_pillow(name):
    for preprocessing in (PLAIN, GREY):
        image = preprocessing.decode(FILES[name])
        assert image.dtype == tf.uint8
        np.testing.assert_array_equal(image, _pillow(FILES[name], preprocessing.channels))


def test_accurate_dct_is_not_the_default():
    # Otherwise the test above could not tell a decoder that forgot to ask for it.
    default = tf.io.decode_jpeg(FILES["jpeg"], channels=3)
    assert np.abs(np.int32(default) - _pillow(FILES["jpeg"], 3)).max() > 0


def test_cmyk_jpeg_becomes_rgb():
    image = PLAIN.decode(CMYK)
    assert image.shape == (20, 30, 3)
    assert np.abs(np.int32(image) - [200, 40, 10]).max() <= 2
    luma = 0.299 * 200 + 0.587 * 40 + 0.114 * 10
    assert np.abs(np.int32(GREY.decode(CMYK)) - luma).max() <= 2


def test_16_bit_png_keeps_its_high_byte():
    image = PLAIN.decode(_encoded(np.uint16(RGB[..., 0]) * 257, "PNG"))
    np.testing.assert_array_equal(image, np.repeat(RGB[..., :1], 3, axis=-1))


@pytest.mark.data
def test_imagenet_files_decode_as_pillow(data_folder):
    files = sorted(pathlib.Path(data_folder, "imagenet_sample").glob("*/*/*"))[:12]
    assert len(files) == 12
    for file in files:
        contents = file.read_bytes()
        np.testing.assert_array_equal(PLAIN.decode(contents), _pillow(contents, 3), err_msg=file)


SHOWN = Preprocessing(
    image_size=(16, 24), resize="short_side", crop_fraction=0.8, mean=(1.0, 2.0, 3.0), scale=4.0
)


def test_exif_orientation_is_ignored_everywhere_alike(tmp_path):
    contents = FILES["jpeg_exif"]
    assert SHOWN.decode(contents).shape == (20, 30, 3)  # a viewer would show 30 rows of 20
    evaluated = SHOWN(SHOWN.decode(contents))

    pipeline = tf.data.Dataset.from_tensors(contents).map(SHOWN.decode).map(SHOWN)
    np.testing.assert_array_equal(next(iter(pipeline)), evaluated)

    served = _save_and_load(SHOWN, tmp_path)
    for image in served(tf.constant([contents, FILES["png"], contents]))["images"][::2]:
        np.testing.assert_array_equal(image, evaluated)


def test_a_bad_string_in_a_served_batch_is_an_invalid_argument(tmp_path):
    served = _save_and_load(SHOWN, tmp_path)
    good = FILES["jpeg"]
    for bad in (b"no image", b"", good[:200], _encoded(RGB, "BMP")):
        with pytest.raises(tf.errors.InvalidArgumentError):
            served(tf.constant([good, bad]))
        assert served(tf.constant([good, CMYK]))["images"].shape == (2, 16, 24, 3)


def _save_and_load(
    preprocessing: Preprocessing, folder: pathlib.Path
) -> tf.types.experimental.Callable:
    """A signature over a batch of strings, written as a SavedModel and read back."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def serve(contents):
        images = tf.map_fn(
            lambda one: preprocessing(preprocessing.decode(one)), contents, tf.float32
        )
        return {"images": images}

    tf.saved_model.save(tf.Module(), folder, signatures={"serving_bytes": serve})
    return tf.saved_model.load(folder).signatures["serving_bytes"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"no image", "Unknown image file format"),
        (b"", "Input is empty"),
        (FILES["jpeg"][:200], "Invalid JPEG data"),
        (FILES["png"][:60], "."),
        (_encoded(RGB, "BMP"), "BMP images are not supported: convert them to PNG or JPEG"),
    ],
)
def test_bytes_that_are_no_image(bad, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        PLAIN.decode(bad)


@pytest.mark.parametrize("contents", [tf.constant([b"a", b"b"]), tf.constant(3)])
def test_decode_takes_one_string(contents):
    with pytest.raises(ValueError, match="`contents` must be one string, the bytes of one image"):
        PLAIN.decode(contents)


def _resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pillow's bilinear resize to (height, width)."""
    return np.float32(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))


@pytest.mark.parametrize("shape", [(61, 90), (90, 61), (40, 40), (20, 27)])
@pytest.mark.parametrize(
    ("size", "fraction"), [((28, 28), 0.875), ((30, 20), 1.0), ((20, 30), 0.7)]
)
def test_short_side_covers_then_crops_the_centre(shape, size, fraction):
    image = _pixels(*shape, 3)
    wanted = [int(side / fraction + 1e-6) for side in size]
    factor = max(wanted[0] / shape[0], wanted[1] / shape[1])
    covering = tuple(int(side * factor + 1e-6) for side in shape)
    assert min(np.subtract(covering, wanted)) == 0
    top, left = ((covering[i] - size[i]) // 2 for i in (0, 1))
    expected = _resized(image, covering)[top : top + size[0], left : left + size[1]]
    result = _unscaled(size, "short_side", fraction)(image)
    np.testing.assert_allclose(result, expected, atol=PILLOW_ROUNDS)


@pytest.mark.parametrize("fraction", [1.0, 0.875, 0.7])
def test_direct_gives_up_the_aspect_ratio(fraction):
    image = _pixels(61, 90, 3)
    full = int(28 / fraction + 1e-6)
    edge = (full - 28) // 2
    expected = _resized(image, (full, full))[edge : edge + 28, edge : edge + 28]
    result = _unscaled((28, 28), "direct", fraction)(image)
    np.testing.assert_allclose(result, expected, atol=PILLOW_ROUNDS)


@pytest.mark.parametrize("fraction", [1.0, 0.875, 0.55])
def test_central_crop_then_resize(fraction):
    image = _pixels(64, 80, 3)
    top, left = round(32 * (1 - fraction)), round(40 * (1 - fraction))
    expected = _resized(image[top : 64 - top, left : 80 - left], (28, 20))
    result = _unscaled((28, 20), "central_crop", fraction)(image)
    np.testing.assert_allclose(result, expected, atol=PILLOW_ROUNDS)


def test_fractions_that_floating_point_rounds_down():
    image = _pixels(20, 30, 3)
    for resize, size in (("central_crop", (16, 24)), ("direct", (16, 24))):
        # 20 * (1 - 0.8) / 2 is 2, though 1.9999999999999996 in floating point.
        np.testing.assert_array_equal(_unscaled(size, resize, 0.8)(image), image[2:18, 3:27])
    # 28 / 0.56 is 50, though 49.99999999999999 in floating point.
    image = _pixels(50, 50, 3)
    result = _unscaled((28, 28), "direct", 0.56)(image)
    np.testing.assert_array_equal(result, image[11:39, 11:39])


def _unscaled(size: tuple[int, int], resize: str, fraction: float) -> Preprocessing:
    return Preprocessing(
        image_size=size,
        resize=resize,
        crop_fraction=fraction,
        interpolation="bilinear_antialias",
        mean=0.0,
        scale=1.0,
    )


def _bilinear(row: np.ndarray, length: int, half_pixel: bool) -> np.ndarray:
    """Samples `row` at `length` places between two neighbours each, without averaging."""
    places = np.arange(length) * len(row) / length
    if half_pixel:
        places = np.clip((np.arange(length) + 0.5) * len(row) / length - 0.5, 0, len(row) - 1)
    low = np.floor(places).astype(int)
    high = np.minimum(low + 1, len(row) - 1)
    return row[low] + (places - low) * (row[high] - row[low])


@pytest.mark.parametrize(("name", "half_pixel"), [("bilinear", True), ("bilinear_corners", False)])
def test_where_bilinear_samples(name, half_pixel):
    row = np.array([0.0, 30.0, 50.0, 210.0, 10.0, 90.0, 40.0])
    image = np.tile(row[None, :, None], (5, 1, 3)) * [1.0, 0.5, 0.25]
    preprocessing = dataclasses.replace(
        PLAIN, image_size=(5, 4), interpolation=name, resize="direct"
    )
    expected = _bilinear(row, 4, half_pixel)[:, None] * [1.0, 0.5, 0.25]
    np.testing.assert_allclose(preprocessing(image), np.tile(expected, (5, 1, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "resample"),
    [("nearest", "NEAREST"), ("area", "BOX"), ("bicubic_antialias", "BICUBIC")],
)
def test_other_interpolations(name, resample):
    image = _pixels(40, 60, 3)
    preprocessing = dataclasses.replace(PLAIN, interpolation=name)
    expected = Image.fromarray(image).resize((30, 20), Image.Resampling[resample])
    np.testing.assert_allclose(preprocessing(image), np.float32(expected), atol=PILLOW_ROUNDS)


def test_bicubic_keeps_an_image_of_the_right_size():
    image = _pixels(20, 30, 3)
    result = dataclasses.replace(PLAIN, interpolation="bicubic")(image)
    np.testing.assert_array_equal(result, image)


def test_a_batch_is_as_its_images():
    images = np.stack([_pixels(61, 90, 3, seed) for seed in range(3)])
    for resize in ("direct", "short_side", "central_crop"):
        preprocessing = dataclasses.replace(SHOWN, resize=resize)
        batch = preprocessing(images)
        assert batch.shape == (3, 16, 24, 3)
        for one, image in zip(batch, images, strict=True):
            np.testing.assert_allclose(one, preprocessing(image), atol=1e-5)


def test_graph_gives_the_eager_pixels_and_a_static_shape():
    for resize in ("direct", "short_side", "central_crop"):
        preprocessing = dataclasses.replace(SHOWN, resize=resize)
        dataset = tf.data.Dataset.from_tensors(FILES["jpeg"]).map(preprocessing.decode)
        assert dataset.element_spec == tf.TensorSpec((None, None, 3), tf.uint8)
        dataset = dataset.map(preprocessing)
        assert dataset.element_spec == tf.TensorSpec((16, 24, 3), tf.float32)
        eager = preprocessing(preprocessing.decode(FILES["jpeg"]))
        np.testing.assert_array_equal(next(iter(dataset)), eager)


def test_normalize_per_channel_in_the_channel_order_of_the_network():
    preprocessing = Preprocessing(
        image_size=(4, 4), mean=(104.0, 117.0, 128.0), scale=(2.0, 4.0, 8.0), channel_order="bgr"
    )
    image = _pixels(4, 4, 3)
    expected = (np.float64(image)[..., ::-1] - [104, 117, 128]) / [2, 4, 8]
    for given in (image, np.float16(image), np.float64(image)):
        for result in (preprocessing.normalize(given), preprocessing(given)):
            assert result.dtype == tf.float32
            np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(preprocessing.normalize(image[None])[0], expected, rtol=1e-6)


def test_binary_images():
    preprocessing = Preprocessing(image_size=(1, 4), channels=1, binarize_threshold=127.0)
    image = np.array([[[0.0], [127.0], [127.5], [255.0]]])
    np.testing.assert_array_equal(preprocessing(image)[0, :, 0], [0, 0, 1, 1])
    signed = dataclasses.replace(preprocessing, mean=127.5, scale=127.5)
    np.testing.assert_array_equal(signed(image)[0, :, 0], [-1, -1, 1, 1])


@pytest.mark.data
def test_mnist_becomes_binary(data_folder):
    file = next(pathlib.Path(data_folder, "tensorflow_datasets/mnist").glob("*/*test.tfrecord*"))
    record = next(iter(tf.data.TFRecordDataset(str(file))))
    png = tf.io.parse_single_example(record, {"image": tf.io.FixedLenFeature([], tf.string)})
    preprocessing = Preprocessing(image_size=(28, 28), channels=1, binarize_threshold=127.5)
    image = preprocessing(preprocessing.decode(png["image"]))
    np.testing.assert_array_equal(image, _pillow(png["image"].numpy(), 1) > 127)
    assert 0.05 < image.numpy().mean() < 0.5


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4), "uint8"), r"shape \(height, width, 3\).*Received: shape \(4, 4\)"),
        (np.zeros((4, 4, 1), "uint8"), r"shape \(height, width, 3\).*Received: shape \(4, 4, 1\)"),
        (np.zeros((4, 4, 3), "int64"), "uint8 or floating point.*Received: dtype int64"),
    ],
)
def test_images_of_another_shape_or_dtype(image, message):
    for function in (PLAIN, PLAIN.normalize):
        with pytest.raises(ValueError, match=message):
            function(image)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"image_size": 224}, "`image_size` must be two positive integers.*image_size=224"),
        ({"image_size": (0, 4)}, r"`image_size` must be two positive.*image_size=\(0, 4\)"),
        ({"image_size": (4.5, 4)}, r"image_size=\(4.5, 4\)"),
        ({"channels": 4}, "`channels` must be 1 or 3. Received: channels=4"),
        ({"resize": "squash"}, "`resize` must be one of 'direct', 'short_side', 'central_c"),
        ({"interpolation": "lanczos"}, "`interpolation` must be one of.*interpolation='lanczos'"),
        ({"channel_order": "RGB"}, "must be one of 'rgb', 'bgr'.*channel_order='RGB'"),
        ({"channel_order": "bgr", "channels": 1}, "must be rgb where `channels` is 1"),
        ({"crop_fraction": 0}, r"`crop_fraction` must be a number in \(0, 1\].*crop_fraction=0"),
        ({"crop_fraction": 1.2}, "crop_fraction=1.2"),
        ({"mean": (1.0, 2.0)}, r"`mean` must be a number or 3 of them.*mean=\(1.0, 2.0\)"),
        ({"mean": float("nan")}, "`mean` must be a number.*mean=nan"),
        ({"scale": "1"}, "`scale` must be a number or 3 of them.*scale=1"),
        ({"scale": (1.0, 0.0, 1.0)}, "`scale` must not be 0"),
        ({"binarize_threshold": 300}, r"None or a number in \[0, 255\].*binarize_threshold=300"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"image_size": (4, 4), **setting})


@pytest.mark.parametrize(
    "preprocessing",
    [
        PLAIN,
        SHOWN,
        Preprocessing(image_size=[28, 28], channels=1, mean=[3], scale=1, binarize_threshold=9),
        Preprocessing((7, 9), 3, "central_crop", 0.875, 127.5, (1, 2, 3), "bgr", "bicubic"),
    ],
)
def test_json_round_trip(preprocessing):
    text = preprocessing.to_json()
    assert json.loads(text)["format_version"] == 1
    again = Preprocessing.from_json(text)
    assert again == preprocessing
    assert hash(again) == hash(preprocessing)
    assert again.to_json() == text


def test_json_of_another_format_is_refused():
    settings = json.loads(PLAIN.to_json())
    for changed, message in (
        (settings | {"format_version": 2}, "`format_version` must be 1. Received: .*=2"),
        (settings | {"zoom": 2, "blur": 1}, "exactly the settings.*Received unknown: blur, zoom"),
        ({k: v for k, v in settings.items() if k != "mean"}, "Received missing: mean"),
        ({k: v for k, v in settings.items() if k != "format_version"}, "format_version=None"),
        (settings | {"channels": 7}, "`channels` must be 1 or 3. Received: channels=7"),
        ([settings], "`text` must be a JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            Preprocessing.from_json(json.dumps(changed))
    with pytest.raises(ValueError, match="`text` must be the JSON of a Preprocessing: Expecting"):
        Preprocessing.from_json("{")
