"""Reads what a file of JPEG or PNG says of itself, without decoding it, and refuses what would only cost time.

A file of some kilobytes may say that it has gigapixels; or it has thousands of empty parts, each of which a decoder
looks at in its slow code, or hundreds of scans, each of which goes over the whole image. So the parts are walked here
first, and counted, up to bounds that no camera and no editor comes near:

    PNG     each chunk is stepped over by its length; their number is bounded by the file's size
    JPEG    each segment up to the first scan is stepped over by its length; scans are counted in what is behind

What is behind the end of a JPEG's image (thumbnails, films, other images of a stereo camera) is cut off: a decoder sees
no more than was counted. Pure. It says nothing of what is inside of the parts: that is a decoder's to find.

Source: ITU-T T.81, annex B (JPEG); the PNG specification, 5.3 (chunks) and 11.2.1 (IHDR).
"""

from __future__ import annotations

import struct
from typing import Final, Literal, NamedTuple

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_MOST_SEGMENTS: Final = 512  # before a JPEG's first scan; large colour profiles and depth maps have some dozens
_MOST_FILL_BYTES: Final = 16  # before a marker
_MOST_SCANS: Final = 32  # of a progressive JPEG; encoders make 10 or so
_FEWEST_CHUNKS: Final = 64  # that a PNG may have whatever its size is
_BYTES_A_CHUNK: Final = 512  # on average, in a larger one; encoders write 4096 and more
_MOST_SIDE: Final = 65_535  # a JPEG has no larger one, and a model no use for one
# Start of frame, of all processes; the three between them are tables and an extension.
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SOS: Final = 0xDA
_SIDES: Final = struct.Struct(">II")
_CHUNK: Final = struct.Struct(">I4s")  # its length and its type, before its data and a checksum of 4 bytes
Kind = Literal["JPEG", "PNG"]


class BadImage(ValueError):
    """What is no image that is decoded here; the message is for its caller."""


class ImageHeader(NamedTuple):
    """What kind of file it is, its sides in pixels as they are stored, and its part that is to be decoded."""

    kind: Kind
    width: int
    height: int
    image: bytes

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_header(encoded: bytes) -> ImageHeader:
    """The header of a file. Raises BadImage."""
    if encoded.startswith(PNG_SIGNATURE):
        found = _png(encoded)
    elif encoded.startswith(b"\xff\xd8\xff"):
        found = _jpeg(encoded)
    else:
        raise BadImage("is neither JPEG nor PNG")
    if not (0 < found.width <= _MOST_SIDE and 0 < found.height <= _MOST_SIDE):
        raise BadImage(f"says that it has {found.width} x {found.height} pixels; sides may have 1 to {_MOST_SIDE}")
    return found


def _png(encoded: bytes) -> ImageHeader:
    if encoded[8:16] != b"\0\0\0\x0dIHDR" or len(encoded) < 33:
        raise BadImage("is a PNG without a header")
    width, height = _SIDES.unpack_from(encoded, 16)
    at, left, last = 33, _FEWEST_CHUNKS + len(encoded) // _BYTES_A_CHUNK, len(encoded) - _CHUNK.size
    while at <= last:
        length, kind = _CHUNK.unpack_from(encoded, at)
        if kind == b"IEND":
            break
        left -= 1
        if left < 0:
            raise BadImage(f"is a PNG of more than {_FEWEST_CHUNKS} chunks, of fewer than {_BYTES_A_CHUNK} bytes each")
        at += length + 12
    return ImageHeader("PNG", width, height, encoded)


def _jpeg(encoded: bytes) -> ImageHeader:
    at, sides = 2, None
    for _ in range(_MOST_SEGMENTS):
        marker, at = _marker(encoded, at)
        length = int.from_bytes(encoded[at : at + 2], "big")
        if length < 2 or at + length > len(encoded):
            raise BadImage("is a JPEG that ends within its header")
        if marker in _FRAMES:
            if sides is not None or length < 8:
                raise BadImage("is a JPEG with more than one frame, or an empty one")
            sides = struct.unpack_from(">HH", encoded, at + 3)
        at += length
        if marker == _SOS:
            break
    else:
        raise BadImage(f"is a JPEG with more than {_MOST_SEGMENTS} segments before its image")
    if sides is None:
        raise BadImage("is a JPEG without a frame")
    # Within a scan's data 0xFF is always followed by 0 or a restart: what looks like a marker is one.
    end = encoded.find(b"\xff\xd9", at)
    end = len(encoded) if end < 0 else end + 2
    if encoded.count(b"\xff\xda", at, end) >= _MOST_SCANS:
        raise BadImage(f"is a JPEG of more than {_MOST_SCANS} scans")
    return ImageHeader("JPEG", sides[1], sides[0], encoded[:end])


def _marker(encoded: bytes, at: int) -> tuple[int, int]:
    """The marker at this place, and the place behind it."""
    if encoded[at : at + 1] != b"\xff":
        raise BadImage("is a JPEG that has no marker where one must be")
    for place in range(at + 1, min(at + 2 + _MOST_FILL_BYTES, len(encoded))):
        if encoded[place] != 0xFF:
            if not 0xC0 <= encoded[place] <= 0xFE or 0xD0 <= encoded[place] <= 0xD9:
                raise BadImage(f"is a JPEG with the marker {encoded[place]:#04x} in its header")
            return encoded[place], place + 1
    raise BadImage("is a JPEG that has no marker where one must be")
