from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from bnzoo.preprocessing import Preprocessing
from export.encoded import decode_images, first_frame, image_size
from export.limits import Limit

PREPROCESSING = Preprocessing(image_size=(8, 9), channels=3, scale=60)
MAX_PIXELS = 31 * 47
LIMIT = Limit(MAX_PIXELS)


def picture(kind: str, height: int = 31, width: int = 47, **options: object) -> bytes:
    coarse = np.random.default_rng(height).uniform(0, 255, (4, 4, 3)).astype(np.float32)
    image = Image.fromarray(tf.cast(tf.image.resize(coarse, (height, width)), tf.uint8).numpy())
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


KINDS: dict[str, bytes] = {
    "JPEG": picture("JPEG"),
    "progressive JPEG": picture("JPEG", progressive=True),
    "PNG": picture("PNG"),
    "GIF": picture("GIF"),
    "GIF with comments": picture("GIF", comment=b"x" * 700, transparency=3, duration=9),
    "lossy WebP": picture("WEBP"),
    "lossless WebP": picture("WEBP", lossless=True),
    "extended WebP": picture("WEBP", exif=b"Exif\0\0MM\0*"),
}


@pytest.fixture(scope="module")
def decoded() -> Callable[[list[bytes]], np.ndarray]:
    prepared = tf.TensorSpec((8, 9, 3), tf.float32)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None,), tf.string)])
    def function(contents: tf.Tensor) -> tf.Tensor:
        position = 100 + tf.range(tf.size(contents))
        decode = PREPROCESSING.decode
        return decode_images(contents, position, decode, PREPROCESSING, prepared, LIMIT)

    return lambda contents: function(tf.constant(contents)).numpy()


@pytest.mark.parametrize("contents", KINDS.values(), ids=KINDS)
def test_sizes_are_read_before_anything_is_decoded(contents: bytes) -> None:
    size = tf.function(image_size, autograph=False)
    assert size(tf.constant(contents)).numpy().tolist() == [31, 47]


def test_images_of_all_kinds_are_as_in_evaluation(decoded: Callable) -> None:
    contents = [*KINDS.values(), picture("PNG", 12, 100)]
    expected = [PREPROCESSING(PREPROCESSING.decode(one)) for one in contents]
    # A graph may multiply by the reciprocal of the scale.
    np.testing.assert_allclose(decoded(contents), expected, rtol=1e-6, atol=1e-6)


def damaged(contents: bytes) -> list[bytes]:
    """Cut where the header is whole, cut in it, and changed in the middle."""
    half = len(contents) // 2
    return [contents[:half], contents[:-3], contents[:20], contents[:half] + bytes(half)]


@pytest.mark.parametrize("kind", ["JPEG", "progressive JPEG", "PNG", "GIF", "lossless WebP"])
def test_every_damaged_image_is_told_and_evaluation_refuses_it_too(
    kind: str, decoded: Callable
) -> None:
    wrong = damaged(KINDS[kind])
    kept = []
    for contents in wrong:
        try:
            PREPROCESSING.decode(contents)
        except tf.errors.InvalidArgumentError:
            kept.append(contents)
    assert wrong[0] in kept
    good = picture("PNG")
    batch = [good, *(one for contents in kept for one in (contents, good))]
    positions = " ".join(str(101 + 2 * number) for number in range(len(kept)))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"no JPEG, PNG, GIF or WebP image, or a damaged one, at position\] \[{positions}\]",
    ):
        decoded(batch)
    assert decoded([good]).shape == (1, 8, 9, 3)


def test_what_is_no_image_is_told_with_what_is_damaged(decoded: Callable) -> None:
    batch = [b"", picture("PNG"), b"no image", KINDS["JPEG"][:300], picture("BMP"), b"GIF89a"]
    match = r"damaged one, at position\] \[100 102 103 104 105\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        decoded(batch)


def png_bomb(height: int, width: int) -> bytes:
    """A PNG of so many black pixels, with no more data than one row has."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(width + 1))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def small_screen(contents: bytes) -> bytes:
    """A GIF whose frame is larger than its screen."""
    return contents[:6] + struct.pack("<HH", 2, 2) + contents[10:]


def test_of_a_gif_its_first_frame_alone_is_decoded(decoded: Callable) -> None:
    """The decoder takes the memory of all frames, of any size, to give one."""
    one, local = KINDS["GIF with comments"], KINDS["GIF"]
    large = picture("GIF", 310, 470)
    table = 3 * 2 << (large[10] & 7)
    many = one[:-1] + 50 * large[13 + table : -1] + b";"
    seen = tf.function(
        lambda contents: decode_images(
            contents,
            tf.range(1),
            tf.strings.length,
            tf.identity,
            tf.TensorSpec((), tf.int32),
            LIMIT,
        ),
        autograph=False,
    )
    # The table of colours in the frame, and not before it.
    size = 3 * 2 << (local[10] & 7)
    frame = local.index(b",", 13 + size)
    flags = bytes([local[frame + 9] | local[10] & 0x87])
    moved = local[:10] + b"\0\0\0" + local[13 + size : frame + 9] + flags + local[13 : 13 + size]
    moved += local[frame + 10 :]
    twice = moved[:-1] + moved[13:]

    lengths = [int(seen([contents])[0]) for contents in (one, many, local, moved, twice)]
    assert lengths == [len(contents) for contents in (one, one, local, moved, moved)]
    np.testing.assert_array_equal(*decoded([one, many]))
    np.testing.assert_array_equal(*decoded([local, twice]))


def test_a_frame_of_many_blocks_is_taken_whole() -> None:
    """Noise, of which 400x400 pixels are over 700 blocks."""
    noise = np.random.default_rng(0).integers(0, 256, (400, 400), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).save(written, "GIF")
    contents = written.getvalue()
    assert len(contents) > 180_000
    assert tf.function(first_frame, autograph=False)(tf.constant(contents)).numpy() == contents


def test_too_large_images_are_told_with_size_and_limit(decoded: Callable) -> None:
    fits = picture("PNG", 31, 47)
    batch = [
        *(fits, png_bomb(30000, 30000), fits, picture("JPEG", 32, 47)),
        *(small_screen(picture("GIF", 31, 48)), picture("WEBP", 48, 31), b"no image"),
    ]
    match = (
        rf"more than {MAX_PIXELS} pixels, .*--max_megapixels.*, at position\] \[101 103 104 105\] "
        r"\[of height and width\] \[\[30000 30000\]\[32 47\]\[31 48\]\.*\[48 31\]\]"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        decoded(batch)
    # One that could be decoded, among none that could not.
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"at position\] \[101\] "):
        decoded([fits, picture("JPEG", 32, 47)])
    assert decoded([fits]).shape == (1, 8, 9, 3)


def test_a_canvas_smaller_than_its_image_hides_nothing(decoded: Callable) -> None:
    """What a WebP header says is what is decoded, or nothing is."""
    contents = picture("WEBP", 60, 50, exif=b"Exif\0\0MM\0*")
    assert contents[12:16] == b"VP8X"
    contents = contents[:24] + bytes([1, 0, 0, 1, 0, 0]) + contents[30:]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"damaged one, at position\] \[100\]"):
        decoded([contents])


def test_images_that_could_not_be_prepared_are_not_called_damaged() -> None:
    """As when memory runs out: each can be decoded, and not all be prepared."""

    def fails(image: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(tf.shape(image)[0] < 31, ["no memory"])]):
            return tf.shape(image)

    function = tf.function(
        lambda contents: decode_images(
            contents,
            tf.range(2),
            PREPROCESSING.decode,
            fails,
            tf.TensorSpec((3,), tf.int32),
            LIMIT,
        ),
        autograph=False,
    )
    small, large = picture("PNG", 30), picture("PNG", 31)
    assert function(tf.constant([small, small])).numpy().tolist() == [[30, 47, 3]] * 2
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        function(tf.constant([small, large]))
    assert "could not be prepared together: most likely memory ran out" in str(caught.value)
    assert "damaged" not in str(caught.value)
