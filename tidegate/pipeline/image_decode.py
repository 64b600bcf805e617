"""The step from files of JPEG or PNG to the pixels that a model takes, by Pillow.

Files come from callers, so nothing of them is believed. Their bytes and the pixels that their headers promise are held
against the step's bounds before any of them is decoded (`image_header.py`), those of all images of a request together:
what a request may take of memory and time is known from the manifest. Only the two decoders are there, by their names:
nothing looks at a file to find out which of Pillow's forty formats it might be. Whatever goes wrong in one refuses that
request; a decoder's crash ends the worker, as one of a model's runtime does, and the worker is started again.

    header ─▶ decode ─▶ upright, by EXIF ─▶ RGB or grey, 8 bits ─▶ the step's size ─▶ scale and layout

What cannot be seen in pixels is left out: of an animation its first frame is taken, alpha is dropped as if it were not
there, of 16 bits the upper 8 are used, and colour profiles are not applied. Images are made smaller by a triangle
filter over all pixels that become one, as Pillow and torchvision do it for training, and not by four of them as the
step `resize`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.models.manifest import TensorSpec
from tidegate.models.steps import ImageDecodeStep
from tidegate.pipeline.image import normalise
from tidegate.pipeline.image_header import BadImage, ImageHeader, Kind, read_header
from tidegate.pipeline.refusal import StepRefused, StepTooLate

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION: Final = 0x0112  # the tag of EXIF: 1 is upright
_Box = tuple[float, float, float, float]


class ImageDecoder:
    """One step with its decoders. Raises ImportError: Pillow is not installed."""

    def __init__(self, step: ImageDecodeStep, pixels: TensorSpec) -> None:
        from PIL import Image as pillow
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile

        # A line of the log for whatever a caller puts into EXIF. Once, and not around each call: to enter and leave
        # `catch_warnings` takes 5 microseconds, and four times as much behind a photograph that filled the caches.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._pillow = pillow
        # By their classes: `Image.open` would import other formats that a JPEG may be the envelope of.
        self._open: Mapping[Kind, Callable[[BytesIO], Image]] = {"JPEG": JpegImageFile, "PNG": PngImageFile}
        self._step = step
        self._dtype = np.dtype(pixels.datatype.numpy_name)
        self._upright = {
            number: getattr(pillow.Transpose, name)
            for number, name in enumerate(
                (
                    "FLIP_LEFT_RIGHT",
                    "ROTATE_180",
                    "FLIP_TOP_BOTTOM",
                    "TRANSPOSE",
                    "ROTATE_270",
                    "TRANSVERSE",
                    "ROTATE_90",
                ),
                start=2,
            )
        }

    def of(self, encoded: NDArray[Any], *, budget_s: float) -> NDArray[Any]:
        """The images as [rows, height, width, channels], or as the step's layout says. Blocks.

        Raises:
            StepRefused: one is no image, or they are larger than the step allows; StepTooLate: not in time.
        """
        step, began_at = self._step, clock.now()
        pixels = self._pixels(self._headers(encoded), began_at + budget_s)
        if self._dtype == np.uint8:
            return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) if step.layout == "nchw" else pixels)
        return normalise(step, pixels).astype(self._dtype, copy=False)

    def _pixels(self, headers: Sequence[ImageHeader], deadline: float) -> NDArray[np.uint8]:
        """uint8[rows, height, width, channels], which may be read-only. Raises StepRefused, StepTooLate."""
        step = self._step
        shape = (step.height, step.width, 3 if step.channels == "RGB" else 1)
        if len(headers) == 1:  # what Pillow gives is the whole: one copy less
            return self._row(headers, 0, deadline).reshape(1, *shape)
        pixels = np.empty((len(headers), *shape), np.uint8)
        for row in range(len(headers)):
            pixels[row] = self._row(headers, row, deadline).reshape(shape)
        return pixels

    def _row(self, headers: Sequence[ImageHeader], row: int, deadline: float) -> NDArray[np.uint8]:
        """The pixels of one image, read-only. Raises StepRefused, StepTooLate."""
        if clock.now() > deadline:
            raise StepTooLate(f"the request's time ended before image {row} of {len(headers)}")
        header = headers[row]
        try:
            return np.asarray(self._fitted(self._in_mode(self._decoded(header))))
        except Exception as error:  # decoders raise what they like: OSError, SyntaxError, struct.error, zlib.error
            words = str(error) if isinstance(error, BadImage) else f"is a {header.kind} that is broken: {error}"
            raise StepRefused(f"image {row} {words}") from error

    def _headers(self, encoded: NDArray[Any]) -> list[ImageHeader]:
        """Of all images, within the step's bounds. Raises StepRefused."""
        step, files = self._step, encoded.tolist()
        size_bytes = sum(map(len, files))
        if size_bytes > step.max_bytes:
            raise StepRefused(
                f"the images have {size_bytes} bytes, and at most {step.max_bytes} (max_bytes) of a request are decoded"
            )
        headers: list[ImageHeader] = []
        pixels = 0
        for row, one in enumerate(files):
            try:
                headers.append(read_header(one.encode() if isinstance(one, str) else bytes(one)))
            except BadImage as error:
                raise StepRefused(f"image {row} {error}") from error
            pixels += headers[-1].pixels
            if pixels > step.max_pixels:
                raise StepRefused(
                    f"up to image {row} there are {pixels} pixels, and at most {step.max_pixels} (max_pixels) of a "
                    "request are decoded"
                )
        return headers

    def _decoded(self, header: ImageHeader) -> Image:
        """The whole image, turned as EXIF says. Raises BadImage, and whatever Pillow raises."""
        image = self._open[header.kind](BytesIO(header.image))
        if image.size != (header.width, header.height):
            raise BadImage("has two sizes")
        image.load()
        if not image.info:  # the file says nothing of itself
            return image
        orientation = None
        with suppress(Exception):  # nobody can tell then how it should lie
            orientation = image.getexif().get(_ORIENTATION)
        turn = self._upright.get(orientation) if isinstance(orientation, int) else None
        return image if turn is None else image.transpose(turn)

    def _in_mode(self, image: Image) -> Image:
        """In 8 bits of the step's channels."""
        image.info.pop("transparency", None)  # one colour of a palette that is none: as it is without
        if image.mode.startswith("I"):  # Pillow would cut at 255
            image = self._pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image if image.mode == self._step.channels else image.convert(self._step.channels)

    def _fitted(self, image: Image) -> Image:
        """In the step's size."""
        step, (width, height) = self._step, image.size
        if step.fit == "crop":  # the largest part of the wanted shape, around the centre
            factor = min(width / step.width, height / step.height)
            wide, high = factor * step.width, factor * step.height
            left, top = (width - wide) / 2, (height - high) / 2
            return self._scaled(image, step.width, step.height, (left, top, left + wide, top + high))
        if step.fit == "pad":
            factor = min(step.width / width, step.height / height)
            wide, high = max(1, round(factor * width)), max(1, round(factor * height))
            black = self._pillow.new(image.mode, (step.width, step.height))
            inner = self._scaled(image, wide, high, (0, 0, width, height))
            black.paste(inner, ((step.width - wide) // 2, (step.height - high) // 2))
            return black
        return self._scaled(image, step.width, step.height, (0, 0, width, height))

    def _scaled(self, image: Image, width: int, height: int, box: _Box) -> Image:
        """The part of the image within the box, in another size.

        Pillow makes rows of the new width first. Of a high and narrow image that would be far more pixels than either
        of the two has, so its columns are made first.
        """
        filter_, (left, top, right, bottom) = self._pillow.Resampling.BILINEAR, box
        if width > image.width and image.height > height:
            image = image.resize((image.width, height), filter_, (0, top, image.width, bottom))
            top, bottom = 0, height
        return image.resize((width, height), filter_, (left, top, right, bottom))

    def __repr__(self) -> str:
        return f"<ImageDecoder {self._step.channels} {self._step.height}x{self._step.width} {self._step.fit}>"
