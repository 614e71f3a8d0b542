"""The image backend, over files as people send them."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from services.preprocess.image import ImageInstance
from tensorline.errors import ConfigError, InvalidTensorError
from tests.services.heap_batch import CPU, HeapBatch, bytes_array, model, parameters, tensor

Array = np.ndarray[Any, Any]


def instance(size: tuple[int, int] = (8, 6), batch: int = 8, **values: Any) -> ImageInstance:
    """`size` is width, height, as Pillow has it."""
    channels = 1 if values.get("colour") == "L" else 3
    dims = (size[1], size[0], channels) if values.get("layout") == "NHWC" else (channels, size[1], size[0])
    text = f"""backend: "image" max_batch_size: {batch} input [ {tensor("image", "BYTES", 1)} ]
        output [ {tensor("pixels", "FP32", *dims)} ] {parameters(**values)}"""
    return ImageInstance(model(text), CPU)


def run(backend: ImageInstance, *files: bytes) -> Array:
    out = backend.execute(HeapBatch({"image": bytes_array(*files)}, len(files)))["pixels"]
    return np.asarray(out)


def picture(width: int = 8, height: int = 6, mode: str = "RGB") -> Image.Image:
    """Every pixel another colour, so that a turn, a flip or swapped channels show."""
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // width, y * 255 // height, (x + y) * 120 // (width + height)], axis=-1)
    return Image.fromarray(rgb.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_chw(image: Image.Image) -> Array:
    return np.asarray(image, np.float32).transpose(2, 0, 1)


def test_a_png_of_the_right_size_comes_out_pixel_for_pixel() -> None:
    np.testing.assert_array_equal(run(instance(), encoded(picture()))[0], as_chw(picture()))


def test_mean_and_scale_are_applied_in_pixel_units() -> None:
    expected = (as_chw(picture()) - np.array([1, 2, 3], np.float32)[:, None, None]) / 128
    np.testing.assert_array_equal(run(instance(mean="1, 2, 3", std=128), encoded(picture()))[0], expected)
    np.testing.assert_array_equal(run(instance(mean="1,2,3", scale=1 / 128), encoded(picture()))[0], expected)


def test_colours_and_layouts() -> None:
    file = encoded(picture())
    np.testing.assert_array_equal(run(instance(colour="BGR"), file)[0], as_chw(picture())[::-1])
    np.testing.assert_array_equal(run(instance(layout="NHWC"), file)[0], np.asarray(picture(), np.float32))
    grey = np.asarray(picture().convert("L"), np.float32)
    np.testing.assert_array_equal(run(instance(colour="L"), file)[0], grey[np.newaxis])
    np.testing.assert_array_equal(run(instance(colour="L", layout="NHWC"), file)[0], grey[:, :, np.newaxis])


def test_the_short_side_is_resized_and_the_middle_cropped() -> None:
    for width, height in ((90, 60), (60, 90), (61, 40), (12, 12), (33, 100)):
        image = picture(width, height)
        factor = 12 / min(width, height)
        resized = image.resize((round(width * factor), round(height * factor)), Image.Resampling.BICUBIC)
        left, top = (resized.width - 8) // 2, (resized.height - 6) // 2
        got = run(instance(resize_short_side=12), encoded(image))[0]
        np.testing.assert_array_equal(got, as_chw(resized.crop((left, top, left + 8, top + 6))))


@pytest.mark.parametrize("name", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_an_exact_resize_stretches_with_the_filter_asked_for(name: str) -> None:
    image = picture(50, 40)
    expected = image.resize((8, 6), Image.Resampling[name.upper()])
    np.testing.assert_array_equal(run(instance(resize_filter=name), encoded(image))[0], as_chw(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_turned_as_the_camera_was_held(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    sideways = orientation > 4
    file = encoded(picture(6, 8) if sideways else picture(8, 6), kind, exif=exif, **options)
    with Image.open(io.BytesIO(file)) as opened:
        expected = as_chw(ImageOps.exif_transpose(opened).convert("RGB"))
    np.testing.assert_array_equal(run(instance(), file)[0], expected)
    with Image.open(io.BytesIO(file)) as opened:
        stretched = as_chw(opened.convert("RGB").resize((8, 6), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(run(instance(exif_orientation="false"), file)[0], stretched)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0II*\0\xff\xff\xff\xff"]
)
def test_broken_exif_data_is_passed_over(exif: bytes) -> None:
    file = encoded(picture(), "JPEG", exif=exif)
    assert run(instance(), file).shape == (1, 3, 6, 8)


def test_what_lies_behind_transparent_pixels() -> None:
    clear = Image.new("RGBA", (8, 6), (10, 20, 30, 0))
    half = Image.new("RGBA", (8, 6), (0, 0, 0, 128))
    assert (run(instance(), encoded(clear)) == 255).all()
    assert run(instance(alpha="#102030"), encoded(clear))[0, :, 0, 0].tolist() == [16, 32, 48]
    assert run(instance(alpha="white"), encoded(half))[0, 0, 0, 0] == pytest.approx(127, abs=1)
    assert (run(instance(colour="L"), encoded(clear)) == 255).all()


def palette_with_transparency() -> bytes:
    image = Image.new("P", (8, 6), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    return encoded(image, transparency=0)


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)


def two_shots() -> bytes:
    """A JPEG with a second one behind it, as phones with two lenses write them."""
    shots = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    return encoded(shots[0], "MPO", save_all=True, append_images=shots[1:])


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_16_bit_colour(red: int) -> bytes:
    """Pillow cannot write these, but phones and scanners do."""
    row = b"\0" + struct.pack(">3H", red, 0, 0x8000) * 8
    header = struct.pack(">IIBBBBB", 8, 6, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def grey_16_bit() -> bytes:
    return encoded(Image.fromarray(np.full((6, 8), 0x4080, np.uint16)))


def cmyk() -> bytes:
    return encoded(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG", quality=95)


@pytest.mark.parametrize(
    ("make", "at", "rgb", "tolerance"),
    [
        (lambda: encoded(Image.new("L", (8, 6), 77)), (1, 1), (77, 77, 77), 0),
        (lambda: encoded(Image.new("1", (8, 6), 1)), (1, 1), (255, 255, 255), 0),
        (lambda: encoded(Image.new("LA", (8, 6), (40, 255))), (1, 1), (40, 40, 40), 0),
        (palette_with_transparency, (0, 0), (255, 255, 255), 0),
        (palette_with_transparency, (1, 1), (0, 255, 0), 0),
        (cmyk, (1, 1), (255, 0, 0), 3),
        (grey_16_bit, (1, 1), (64, 64, 64), 0),
        (lambda: png_16_bit_colour(0xC0FF), (1, 1), (0xC0, 0, 0x80), 0),
        (lambda: encoded(Image.new("RGB", (8, 6), "red"), transparency=(255, 0, 0)), (1, 1), (255, 255, 255), 0),
        (lambda: animated("WEBP"), (1, 1), (255, 0, 0), 0),
        (lambda: animated("PNG"), (1, 1), (255, 0, 0), 0),
        (two_shots, (1, 1), (255, 0, 0), 3),
        (lambda: encoded(Image.new("RGB", (8, 6), "blue"), "WEBP", lossless=True), (1, 1), (0, 0, 255), 0),
        (lambda: encoded(Image.new("RGB", (8, 6), "blue"), "JPEG", progressive=True), (1, 1), (0, 0, 255), 3),
    ],
)
def test_every_kind_of_pixel(
    make: Callable[[], bytes], at: tuple[int, int], rgb: tuple[int, int, int], tolerance: int
) -> None:
    pixels = run(instance(), make())[0]
    assert np.abs(pixels[:, at[0], at[1]] - np.array(rgb)).max() <= tolerance


def bomb() -> bytes:
    """60,000 x 60,000 in the header, nothing after it."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b""))


def large_claim() -> bytes:
    """Between our bound and Pillow's."""
    header = struct.pack(">IIBBBBB", 8000, 8000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "is empty"),
        (b"hello", "is not an image; allowed are JPEG, PNG and WebP"),
        (b"\0" * 1000, "is not an image; allowed are JPEG, PNG and WebP"),
        (encoded(picture(), "GIF"), "is GIF; allowed are JPEG, PNG and WebP"),
        (encoded(picture(), "BMP"), "is BMP; allowed are JPEG, PNG and WebP"),
        (encoded(picture(), "TIFF"), "is TIFF; allowed are JPEG, PNG and WebP"),
        (b"\0\0\0\x1cftypheic" + b"\0" * 30, "is HEIC; allowed are JPEG, PNG and WebP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG; allowed are JPEG, PNG and WebP"),
        (encoded(picture(400, 300), "JPEG")[:2000], "is truncated or damaged"),
        (encoded(picture(400, 300), "PNG")[:500], "is truncated or damaged"),
        (encoded(picture(400, 300), "WEBP")[:300], "is truncated or damaged"),
        (encoded(picture(), "JPEG")[:30], "is truncated or damaged"),
        (encoded(picture(), "PNG")[:20], "is truncated or damaged"),
        (bomb(), "has more than the 50000000 pixels allowed"),
        (large_claim(), "is 8000x8000, more than the 50000000 pixels allowed"),
    ],
)
def test_what_is_no_usable_image_is_refused_with_its_index_and_the_reason(file: bytes, reason: str) -> None:
    with pytest.raises(InvalidTensorError) as caught:
        run(instance(), encoded(picture()), file)
    assert str(caught.value) == f"input 'image': image 1 {reason}"


def test_bounds_of_the_configuration() -> None:
    file = encoded(picture(50, 40))
    with pytest.raises(
        InvalidTensorError, match=r"^input 'image': image 0 is 50x40, more than the 1999 pixels allowed$"
    ):
        run(instance(max_pixels=1999), file)
    run(instance(max_pixels=2000), file)
    with pytest.raises(InvalidTensorError, match=rf"image 0 has {len(file)} bytes, more than the 20 allowed$"):
        run(instance(max_bytes=20), file)
    with pytest.raises(InvalidTensorError, match=r"image 0 is 50x40, not 8x6, and is not to be cropped$"):
        run(instance(resize="none", crop="none"), file)
    with pytest.raises(InvalidTensorError, match=r"image 0 is 5x4, too small to crop 8x6 from it$"):
        run(instance(resize="none"), encoded(picture(5, 4)))


def test_the_pixels_are_written_where_the_batch_says() -> None:
    batch = HeapBatch({"image": bytes_array(encoded(picture()), encoded(picture()))}, 2)
    assert instance().execute(batch)["pixels"] is batch.made["pixels"]


def test_without_batching_one_image_is_one_picture() -> None:
    batch = HeapBatch({"image": bytes_array(encoded(picture()), shape=(1,))})
    assert instance(batch=0).execute(batch)["pixels"].shape == (3, 6, 8)


def test_a_damaged_jpeg_never_raises_anything_else() -> None:
    """Every byte of the header region turned over once, and cuts everywhere."""
    canvas = picture(40, 30)
    ImageDraw.Draw(canvas).ellipse((5, 5, 30, 25), fill="red")
    backend = instance()
    for kind in ("JPEG", "PNG", "WEBP"):
        good = encoded(canvas, kind)
        spoilt = [good[:i] + bytes([good[i] ^ 0xFF]) + good[i + 1 :] for i in range(min(len(good), 200))]
        for file in (*spoilt, *(good[:cut] for cut in range(0, len(good), 17))):
            try:
                run(backend, file)
            except InvalidTensorError as error:
                assert "image 0" in str(error)  # noqa: PT017 - most of them are still pictures


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"crop": "middle"}, "parameter 'crop' is 'middle'; allowed: centre, none"),
        (
            {"resize_filter": "cubic"},
            "parameter 'resize_filter' is 'cubic'; allowed: bicubic, bilinear, lanczos, nearest",
        ),
        ({"colour": "rgb"}, "parameter 'colour' is 'rgb'; allowed: RGB, BGR, L"),
        ({"exif_orientation": "yes"}, "parameter 'exif_orientation' is 'yes'; allowed: true, false"),
        ({"mean": "1,2"}, "parameter 'mean' is '1,2'; allowed: one number or 3 of them, separated by commas"),
        ({"mean": "nan"}, "parameter 'mean' is 'nan'; allowed: one number or 3 of them, separated by commas"),
        ({"std": "0"}, "parameter 'std' is '0'; allowed: one number or 3 of them, separated by commas, not 0"),
        ({"max_pixels": "0"}, "parameter 'max_pixels' is '0'; allowed: whole numbers from 1 to 89478485"),
        ({"max_bytes": "1e6"}, "parameter 'max_bytes' is '1e6'; allowed: whole numbers from 1 to 2147483648"),
        ({"alpha": "clear"}, "parameter 'alpha' is 'clear'; allowed: a colour such as #ffffff or white"),
        ({"color": "RGB"}, "parameter 'color' is not one of backend 'image'; did you mean 'colour'?"),
        (
            {"short_side": "3"},
            "parameter 'short_side' is not one of backend 'image'; did you mean 'resize_short_side'?",
        ),
        ({"resize_short_side": "5"}, "parameter 'resize_short_side' is '5'; allowed: 6 and more, to crop 8x6 from it"),
        (
            {"scale": "1", "std": "1"},
            "parameters 'scale' and 'std' are given, but they say the same thing; leave one out",
        ),
        (
            {"resize": "exact", "crop": "centre"},
            "parameter 'resize' is 'exact', which leaves nothing for 'resize_short_side' or 'crop'",
        ),
    ],
)
def test_a_parameter_that_cannot_be_is_named_at_load(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instance(**values)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (tensor("a", "UINT8", 1), tensor("b", "FP32", 3, 4, 4), "input 'a' is UINT8; backend 'image' takes BYTES"),
        (tensor("a", "BYTES", 1), tensor("b", "INT32", 3, 4, 4), r"output 'b' is INT32 \[3, 4, 4\]; wanted: FP32"),
        (tensor("a", "BYTES", 1), tensor("b", "FP32", 3, -1, 4), r"output 'b' is FP32 \[3, -1, 4\]; wanted: FP32"),
        (tensor("a", "BYTES", 1), tensor("b", "FP32", 4, 4, 3), r"output 'b' has dims \[4, 4, 3\]; wanted by 'layout'"),
        (
            tensor("a", "BYTES", 1),
            tensor("b", "FP32", 9),
            r"output 'b' is FP32 \[9\]; wanted: FP32 \[3, height, width\]",
        ),
        (
            tensor("a", "BYTES", 1) + "," + tensor("c", "BYTES", 1),
            tensor("b", "FP32", 3, 4, 4),
            "backend 'image' needs exactly one input, the configuration has 2",
        ),
    ],
)
def test_tensors_that_are_no_picture_are_refused_at_load(inputs: str, outputs: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ImageInstance(model(f'backend: "image" max_batch_size: 4 input [ {inputs} ] output [ {outputs} ]'), CPU)
