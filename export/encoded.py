"""Encoded images of a request, decoded; those that cannot be are told by their positions.

TensorFlow's decoders fail a request as a whole and do not say which image it was. tf.data can leave
out what fails: so all images are decoded as its one element, and where that is missing, one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from .limits import Limit

# Bytes of a file in which a PNG, GIF or WebP image says its size.
_HEADER = 32
# Blocks before the first frame of a GIF, such as comments, that are passed over.
_GIF_BLOCKS = 10_000
# Blocks of the first frame, of at most 255 bytes each.
_FRAME_BLOCKS = 200_000
# Positions that a message has at most.
_NAMED = 100


def decode_images(
    image_bytes: tf.Tensor,
    position: tf.Tensor,
    decode: Callable[[tf.Tensor], tf.Tensor],
    prepare: Callable[[tf.Tensor], tf.Tensor],
    prepared: tf.TensorSpec,
    limit: Limit,
) -> tf.Tensor:
    """(In a tf.function.) `prepare(decode(contents))` of each of `image_bytes`, stacked.

    Args:
        image_bytes: string [N], N at least 1.
        position: int32 [N], where they are in the request.
        decode: from one string to an image.
        prepare: from that to what the network sees, of the shape and type `prepared`.
        prepared: of one image.
        limit: an image beyond it is not decoded.

    Raises:
        tf.errors.InvalidArgumentError: (when it runs) images are too large or cannot be decoded;
            the message has their positions.
    """
    count = tf.shape(image_bytes)[0]

    def checked(contents: tf.Tensor) -> tf.Tensor:
        small = limit.allows(image_size(contents))
        with tf.control_dependencies([tf.debugging.Assert(small, ["too large"])]):
            return prepare(decode(first_frame(tf.identity(contents))))

    def together(contents: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(checked, contents, fn_output_signature=prepared)

    nothing = tf.zeros((0, *prepared.shape), prepared.dtype)
    every = tf.data.Dataset.from_tensors(image_bytes).map(together).ignore_errors()
    images = every.concatenate(tf.data.Dataset.from_tensors(nothing)).take(1).get_single_element()
    complete = tf.equal(tf.shape(images)[0], count)
    damaged, too_large, sizes = tf.cond(
        complete,
        lambda: (position[:0], position[:0], tf.zeros((0, 2), tf.int64)),
        lambda: _wrong(image_bytes, position, decode, limit),
    )
    named = tf.size(too_large) + tf.size(damaged)
    checks = [
        tf.debugging.Assert(
            tf.equal(tf.size(too_large), 0),
            [
                f"image_bytes holds images {limit}, at position",
                too_large,
                "of height and width",
                sizes,
            ],
            summarize=_NAMED,
        ),
        tf.debugging.Assert(
            tf.equal(tf.size(damaged), 0) | (tf.size(too_large) > 0),
            [
                "image_bytes is no JPEG, PNG, GIF or WebP image, or a damaged one, at position",
                damaged,
            ],
            summarize=_NAMED,
        ),
        tf.debugging.Assert(
            complete | (named > 0),
            [
                "each image of image_bytes can be decoded, but they could not be prepared "
                "together: most likely memory ran out; send fewer or smaller ones"
            ],
        ),
    ]
    with tf.control_dependencies(checks):
        return tf.ensure_shape(images, (None, *prepared.shape))


def _wrong(
    image_bytes: tf.Tensor,
    position: tf.Tensor,
    decode: Callable[[tf.Tensor], tf.Tensor],
    limit: Limit,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The positions of those that cannot be decoded and of those that are too large, whose height
    and width come last."""
    count = tf.shape(image_bytes, out_type=tf.int64)[0]

    def examined(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        contents = tf.gather(image_bytes, index)
        size = image_size(contents)

        def decoded() -> tf.Tensor:
            with tf.control_dependencies([decode(first_frame(contents))]):
                return tf.identity(size)

        return index, tf.cond(limit.allows(size), decoded, lambda: size)

    # A last one that is always there: a data set of none has no element.
    last = tf.constant(-1, tf.int64), tf.zeros((2,), tf.int64)
    every = tf.data.Dataset.range(count).map(examined).ignore_errors()
    every = every.concatenate(tf.data.Dataset.from_tensors(last)).batch(count + 1)
    index, size = (column[:-1] for column in every.get_single_element())
    read = tf.reduce_any(tf.range(count)[:, tf.newaxis] == index, axis=1)
    large = tf.logical_not(limit.allows(size))
    return (
        tf.boolean_mask(position, tf.logical_not(read)),
        tf.gather(position, tf.boolean_mask(index, large)),
        tf.boolean_mask(size, large),
    )


def image_size(contents: tf.Tensor) -> tf.Tensor:
    """(In a tf.function.) Height and width in pixels that an image file says it has.

    Nothing is decoded. TensorFlow decodes the first frame of a GIF, and in the frame's own size.

    Args:
        contents: one string.

    Returns:
        int64 [2]; zeros for what is no JPEG, PNG, GIF or WebP image.

    Raises:
        tf.errors.InvalidArgumentError: (when it runs) it begins as a JPEG or GIF and does not go on
            as one.
    """
    beginning = tf.strings.substr(contents, 0, _HEADER)
    header = tf.cast(tf.io.decode_raw(beginning, tf.uint8, fixed_length=_HEADER), tf.int64)

    def says(start: int, text: bytes) -> tf.Tensor:
        return tf.reduce_all(header[start : start + len(text)] == tf.constant(list(text), tf.int64))

    def png() -> tf.Tensor:
        return tf.stack([_number(header[20:24][::-1]), _number(header[16:20][::-1])])

    def webp() -> tf.Tensor:
        extended = tf.stack([_number(header[27:30]), _number(header[24:27])]) + 1
        bits = _number(header[21:25])
        lossless = tf.stack([bits // 2**14 % 2**14, bits % 2**14]) + 1
        lossy = tf.stack([_number(header[28:30]), _number(header[26:28])]) % 2**14
        return tf.where(says(12, b"VP8X"), extended, tf.where(says(12, b"VP8L"), lossless, lossy))

    return tf.case(
        [
            (
                says(0, b"\xff\xd8\xff"),
                lambda: tf.image.extract_jpeg_shape(contents, output_type=tf.int64)[:2],
            ),
            (says(0, b"\x89PNG"), png),
            (says(0, b"GIF8"), lambda: _gif_size(contents)),
            (says(0, b"RIFF"), webp),
        ],
        default=lambda: tf.zeros((2,), tf.int64),
    )


def _number(header: tf.Tensor) -> tf.Tensor:
    """Of bytes, the lowest first."""
    return tf.reduce_sum(header * tf.constant([256**i for i in range(header.shape[0])], tf.int64))


def first_frame(contents: tf.Tensor) -> tf.Tensor:
    """(In a tf.function.) A GIF cut off behind its first frame, any other file as it is.

    TensorFlow's decoder gives the first frame alone, and decodes all of them, however many and
    large they are.

    Args:
        contents: one string.

    Raises:
        tf.errors.InvalidArgumentError: (when it runs) a GIF without a frame, or with one of too
            many blocks.
    """
    is_gif = tf.equal(tf.strings.substr(contents, 0, 4), b"GIF8")
    return tf.cond(is_gif, lambda: _cut_gif(contents), lambda: contents)


def _cut_gif(contents: tf.Tensor) -> tf.Tensor:
    data = tf.io.decode_raw(contents, tf.uint8)
    size = tf.size(data, tf.int64)

    def number_at(at: tf.Tensor) -> tf.Tensor:
        return tf.cast(data[at], tf.int64)

    def goes_on(at: tf.Tensor) -> tf.Tensor:
        return (at < size) & (number_at(tf.minimum(at, size - 1)) > 0)

    # Behind the frame's size and its table of colours is one byte, and then come the blocks.
    frame = _gif_frame(contents)
    start = frame + 10 + _table_size(number_at(frame + 9)) + 1
    (end,) = tf.while_loop(
        goes_on,
        lambda at: (at + number_at(at) + 1,),
        (start,),
        maximum_iterations=_FRAME_BLOCKS,
    )
    ended = tf.debugging.Assert(tf.logical_not(goes_on(end)), ["a GIF of too many blocks"])
    with tf.control_dependencies([ended]):
        whole = tf.strings.substr(contents, tf.zeros_like(end), end + 1) + b";"
    # One that is cut short is for the decoder to refuse.
    return tf.where(end < size, whole, contents)


def _gif_size(contents: tf.Tensor) -> tf.Tensor:
    """Height and width of the first frame."""
    size = _bytes_at(contents, _gif_frame(contents) + 5, 4)
    return tf.stack([_number(size[2:]), _number(size[:2])])


def _gif_frame(contents: tf.Tensor) -> tf.Tensor:
    """Where the first frame begins, which is behind a table of colours and extensions.

    An extension is two bytes and then blocks, each behind its length, up to one of length 0.
    """

    def byte_at(at: tf.Tensor) -> tf.Tensor:
        return _bytes_at(contents, at, 1)[0]

    def before_frame(at: tf.Tensor, inside: tf.Tensor) -> tf.Tensor:
        return inside | (byte_at(at) == ord("!"))

    def passed(at: tf.Tensor, inside: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        length = byte_at(at)
        return at + tf.where(inside, length + 1, 2), tf.logical_not(inside) | (length > 0)

    start = (13 + _table_size(byte_at(tf.constant(10, tf.int64))), tf.constant(False))
    at, _ = tf.while_loop(before_frame, passed, start, maximum_iterations=_GIF_BLOCKS)
    frame = tf.debugging.Assert(byte_at(at) == ord(","), ["a GIF without a frame"])
    with tf.control_dependencies([frame]):
        return tf.identity(at)


def _table_size(packed: tf.Tensor) -> tf.Tensor:
    """Bytes of the table of colours that follows a byte of flags."""
    entries = tf.bitwise.left_shift(tf.constant(2, tf.int64), packed % 8)
    return tf.where(packed >= 128, 3 * entries, 0)


def _bytes_at(contents: tf.Tensor, at: tf.Tensor, count: int) -> tf.Tensor:
    found = tf.io.decode_raw(tf.strings.substr(contents, at, count), tf.uint8)
    return tf.cast(tf.ensure_shape(found, (count,)), tf.int64)
