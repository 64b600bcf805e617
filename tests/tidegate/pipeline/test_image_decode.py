"""Files of images become the pixels that Pillow gives, and what is no such file is its sender's mistake."""

from __future__ import annotations

import struct
import sys
import warnings
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.support.models.images import as_file, as_tensor
from tidegate import clock
from tidegate.engines.errors import EngineError
from tidegate.models.example import grey_png
from tidegate.models.manifest import Axis, Cost, Pipeline, TensorSpec
from tidegate.models.steps import ImageDecodeStep
from tidegate.pipeline.config import default_steps
from tidegate.pipeline.image_decode import ImageDecoder
from tidegate.pipeline.pipeline_engine import PipelineEngine
from tidegate.pipeline.plan import StepPlan
from tidegate.pipeline.refusal import StepRefused, StepTooLate
from tidegate.types import Datatype

RANDOM = np.random.default_rng(3)
COLOURS: NDArray[np.uint8] = RANDOM.integers(0, 256, (12, 20, 3)).astype(np.uint8)
EXIF_ORIENTATION = 0x0112


def decoded(*files: Any, datatype: Datatype = Datatype.UINT8, budget_s: float = 60.0, **keys: Any) -> NDArray[Any]:
    step = ImageDecodeStep(("file",), ("pixels",), **({"height": 12, "width": 20} | keys))
    decoder = ImageDecoder(step, TensorSpec("pixels", datatype, ("batch", 1, 1, 3)))
    return decoder.of(as_tensor(*files), budget_s=budget_s)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def test_png_is_exact_and_jpeg_is_as_pillow_reads_it() -> None:
    jpeg = as_file(COLOURS, "JPEG", quality=90)
    found = decoded(as_file(COLOURS), jpeg)
    np.testing.assert_array_equal(found[0], COLOURS)
    with Image.open(BytesIO(jpeg)) as image:
        np.testing.assert_array_equal(found[1], np.asarray(image))


def test_layout_scale_and_datatype_are_the_tensors() -> None:
    keys: dict[str, Any] = {"scale": 1 / 255, "mean": (0.5, 0.4, 0.3), "std": (0.5, 0.2, 0.1), "layout": "nchw"}
    expected = ((COLOURS / 255 - keys["mean"]) / keys["std"]).transpose(2, 0, 1)
    for datatype, near in ((Datatype.FP32, 1e-5), (Datatype.FP16, 1e-2)):
        found = decoded(as_file(COLOURS), datatype=datatype, **keys)
        assert found.dtype == datatype.numpy_name and found.shape == (1, 3, 12, 20)
        np.testing.assert_allclose(found[0], expected, atol=near)
    grey = decoded(as_file(COLOURS), channels="L")
    np.testing.assert_array_equal(grey[0, :, :, 0], np.asarray(Image.fromarray(COLOURS).convert("L")))


def test_other_sizes_are_stretched_cut_or_padded() -> None:
    image, file = Image.fromarray(COLOURS), as_file(COLOURS)
    size = {"height": 6, "width": 6}
    bilinear = Image.Resampling.BILINEAR
    np.testing.assert_array_equal(decoded(file, **size)[0], np.asarray(image.resize((6, 6), bilinear)))
    cut = image.resize((6, 6), bilinear, box=(4, 0, 16, 12))
    np.testing.assert_array_equal(decoded(file, fit="crop", **size)[0], np.asarray(cut))
    padded = decoded(file, fit="pad", **size)[0]
    np.testing.assert_array_equal(padded, np.asarray(ImageOps.pad(image, (6, 6), bilinear, color=0)))
    assert not padded[0].any() and padded[1:5].any()


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (3, 50_000)])
@pytest.mark.parametrize("fit", ["resize", "crop", "pad"])
def test_an_image_that_is_a_line_takes_no_more_memory_than_it_or_its_result(size: tuple[int, int], fit: str) -> None:
    """In the other order the first would have 30 million pixels in between, and with larger sides gigabytes."""
    found = decoded(as_file(Image.new("L", size, 200)), height=500, width=500, fit=fit)
    assert found.shape == (1, 500, 500, 3) and found.max() == 200


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_photographs_are_turned_as_exif_says(orientation: int, kind: str) -> None:
    image = Image.fromarray(COLOURS)
    exif = image.getexif()
    exif[EXIF_ORIENTATION] = orientation
    file = as_file(image, kind, exif=exif)
    with Image.open(BytesIO(file)) as opened:
        upright = np.asarray(ImageOps.exif_transpose(opened))
    height, width = upright.shape[:2]
    np.testing.assert_array_equal(decoded(file, height=height, width=width)[0], upright)


def test_palettes_alpha_sixteen_bits_ink_and_animations_become_colours() -> None:
    image = Image.fromarray(COLOURS)
    alpha = image.copy()
    alpha.putalpha(7)
    few = image.quantize(16)
    np.testing.assert_array_equal(decoded(as_file(alpha))[0], COLOURS)
    expected = np.asarray(few.convert("RGB"))
    np.testing.assert_array_equal(decoded(as_file(few))[0], expected)
    np.testing.assert_array_equal(decoded(as_file(few, transparency=b"\0\1\2"))[0], expected)
    deep = (np.arange(240).reshape(12, 20) * 273).astype(np.uint16)
    np.testing.assert_array_equal(decoded(as_file(deep), channels="L")[0, :, :, 0], deep >> 8)
    bits = Image.fromarray(COLOURS[:, :, 0] > 127)
    assert set(decoded(as_file(bits), channels="L").ravel().tolist()) == {0, 255}
    ink = as_file(image.convert("CMYK"), "JPEG", quality=100)
    assert np.abs(decoded(ink)[0].astype(int) - COLOURS).mean() < 12
    frames = [Image.fromarray(255 - COLOURS)]
    np.testing.assert_array_equal(decoded(as_file(image, save_all=True, append_images=frames))[0], COLOURS)
    both = as_file(image, save_all=True, append_images=[image, *frames], default_image=True)
    np.testing.assert_array_equal(decoded(both)[0], COLOURS)


GOOD_PNG, GOOD_JPEG = as_file(COLOURS), as_file(COLOURS, "JPEG")
SOS = GOOD_JPEG.index(b"\xff\xda")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "image 1 is neither JPEG nor PNG"),
        (b"GIF89a" + bytes(40), "image 1 is neither JPEG nor PNG"),
        (as_file(COLOURS, "BMP"), "image 1 is neither JPEG nor PNG"),
        (as_file(COLOURS, "TIFF"), "image 1 is neither JPEG nor PNG"),
        ("a text", "image 1 is neither JPEG nor PNG"),
        (GOOD_PNG[:24], "image 1 is a PNG without a header"),
        (GOOD_PNG[:-30], "image 1 is a PNG that is broken: image file is truncated"),
        (GOOD_PNG[:60] + b"x" + GOOD_PNG[61:], "image 1 is a PNG that is broken"),
        (GOOD_JPEG[: SOS - 3], "image 1 is a JPEG that ends within its header"),
        (GOOD_JPEG[: SOS + 40], "image 1 is a JPEG that is broken: image file is truncated"),
        (GOOD_JPEG[:2] + b"\0" + GOOD_JPEG[2:], "image 1 is neither JPEG nor PNG"),
        (GOOD_JPEG[:20] + b"\0" + GOOD_JPEG[20:], "image 1 is a JPEG that has no marker where one must be"),
        (GOOD_JPEG[:2] + b"\xff" * 40 + GOOD_JPEG[2:], "image 1 is a JPEG that has no marker where one must be"),
        (GOOD_JPEG[:2] + GOOD_JPEG[SOS:], "image 1 is a JPEG without a frame"),
        (GOOD_JPEG[:2] + segment(0xFE, b"") * 600 + GOOD_JPEG[2:], "more than 512 segments before its image"),
        (GOOD_JPEG[:SOS] + GOOD_JPEG[SOS:SOS + 30] * 40 + b"\xff\xd9", "image 1 is a JPEG of more than 32 scans"),
        (png(0, 4), "says that it has 0 x 4 pixels"),
        (png(2**31, 2**31), "says that it has 2147483648 x 2147483648 pixels"),
        (png(60_000, 60_000), "up to image 1 there are 3600000240 pixels, and at most 16777216"),
        (png(4, 4, chunk(b"tEXt", b"a\0b") * 9000), "more than 64 chunks, of fewer than 512 bytes each"),
        (png(4, 4), "image 1 is a PNG that is broken"),
        (png(4, 4, chunk(b"IDAT", zlib.compress(b"x" * 7))), "image 1 is a PNG that is broken"),
    ],
    ids=range(22),
)  # fmt: skip
def test_what_is_no_image_is_refused_and_says_which_one(file: Any, words: str) -> None:
    with pytest.raises(StepRefused, match=words.replace("(", r"\(")):
        decoded(GOOD_PNG, file)


@pytest.mark.slow
def test_a_bomb_is_refused_by_its_header_in_no_time_and_no_memory() -> None:
    bomb = png(20_000, 20_000, chunk(b"IDAT", zlib.compress(bytes(60_001) * 2_000, 9)))
    with pytest.raises(StepRefused, match=r"400000000 pixels, and at most 16777216 \(max_pixels\)"):
        decoded(bomb)
    with pytest.raises(StepRefused, match=r"480 pixels, and at most 479 \(max_pixels\) of a request"):
        decoded(GOOD_PNG, GOOD_PNG, max_pixels=479)  # together
    assert decoded(GOOD_PNG, GOOD_PNG, max_pixels=480).shape[0] == 2
    with pytest.raises(StepRefused, match=rf"{2 * len(GOOD_PNG)} bytes, and at most 900 \(max_bytes\) of a request"):
        decoded(GOOD_PNG, GOOD_PNG, max_bytes=900)


def test_a_frame_that_says_another_size_later_is_refused() -> None:
    frame = GOOD_JPEG.index(b"\xff\xc0")
    length = int.from_bytes(GOOD_JPEG[frame + 2 : frame + 4], "big") + 2
    larger = bytearray(GOOD_JPEG[frame : frame + length])
    larger[5:9] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(StepRefused, match="more than one frame"):
        decoded(GOOD_JPEG[: frame + length] + bytes(larger) + GOOD_JPEG[frame + length :])


def test_what_follows_a_photograph_is_not_looked_at() -> None:
    """Telephones put films and further images behind the first one."""
    np.testing.assert_array_equal(decoded(GOOD_JPEG + b"\xff\xda" * 99), decoded(GOOD_JPEG))


def test_broken_exif_leaves_an_image_as_it_lies() -> None:
    file = GOOD_JPEG[:2] + segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff") + GOOD_JPEG[2:]
    np.testing.assert_array_equal(decoded(file), decoded(GOOD_JPEG))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    good=st.sampled_from([GOOD_PNG, GOOD_JPEG, as_file(COLOURS, "JPEG", progressive=True), grey_png(9, 9)]),
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 6)), min_size=1, max_size=4
    ),
)
def test_a_changed_file_is_pixels_or_refused(good: bytes, changes: list[tuple[int, bytes, int]]) -> None:
    for place, put, left_out in changes:
        at = place % (len(good) + 1)
        good = good[:at] + put + good[at + left_out :]
    try:
        found = decoded(good)
    except StepRefused as error:
        assert str(error).startswith(("image 0 ", "up to image 0"))
    else:
        assert found.shape == (1, 12, 20, 3) and found.dtype == np.uint8


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"]))
def test_any_bytes_are_refused(file: bytes, begin: bytes) -> None:
    with pytest.raises(StepRefused):
        decoded(begin + file)


def test_images_that_would_be_late_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    instants = iter((10.0, 10.1, 10.6))
    monkeypatch.setattr(clock, "now", lambda: next(instants))
    with pytest.raises(StepTooLate, match="the request's time ended before image 1 of 3"):
        decoded(GOOD_PNG, GOOD_PNG, GOOD_PNG, budget_s=0.5)


def test_without_pillow_the_model_does_not_load_and_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = TensorSpec("pixels", Datatype.UINT8, ("batch", 2, 2, 3))
    file = TensorSpec("file", Datatype.BYTES, ("batch",))
    step = ImageDecodeStep(("file",), ("pixels",), height=2, width=2)
    pipeline = Pipeline((pixels,), (), Cost("pixels", "pixels"), before=(step,))
    of = StepPlan(pipeline, (file,), (), {"batch": Axis(1, 4)}, "", default_steps().limits, "before")
    assert PipelineEngine(of).infer({"file": as_tensor(GOOD_PNG)})["pixels"].shape == (1, 2, 2, 3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        EngineError, match=r"step image_decode \(pixels\) needs Pillow.*pip install 'tidegate\[images\]'"
    ):
        PipelineEngine(of)


def test_an_image_alone_is_the_image_that_it_is_among_others() -> None:
    one, other = (as_file(Image.fromarray(np.roll(COLOURS, turn, 1))) for turn in (0, 5))
    both = decoded(one, other)
    np.testing.assert_array_equal(np.concatenate([decoded(one), decoded(other)]), both)
    tiny = np.concatenate([decoded(file, height=4, width=4, channels="L", layout="nchw") for file in (one, other)])
    np.testing.assert_array_equal(tiny, decoded(one, other, height=4, width=4, channels="L", layout="nchw"))


def test_what_pillow_says_of_a_broken_exif_is_no_line_of_the_log() -> None:
    file = BytesIO()
    broken = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0"  # two entries, and the end within the first
    Image.fromarray(COLOURS).save(file, "JPEG", exif=broken)
    with pytest.warns(UserWarning, match="EXIF"):
        Image.open(BytesIO(file.getvalue())).getexif()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert decoded(file.getvalue()).shape == (1, 12, 20, 3)
    assert not said
