"""From an image file's bytes to upright 8-bit pixels, whatever the file is."""

import io
from collections.abc import Mapping
from typing import Final

import numpy as np
from PIL import Image

__all__ = ["FORMATS", "DecodeError", "decode_image"]

FORMATS: Final = ("JPEG", "PNG", "WEBP")
"""What Pillow may open; it knows some forty formats, and each of their decoders is one more way in."""

ALLOWED: Final = "allowed are JPEG, PNG and WebP"

OTHERS: Final = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"%PDF": "PDF",
    b"\0\0\x01\0": "ICO",
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
}
"""First bytes of what else is often sent, so that the answer can name it."""

STARTS: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")

ORIENTATION: Final = 0x0112
TURNS: Final[Mapping[int, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation."""


class DecodeError(Exception):
    """Why a file is no usable image, to be said after its name: "is ...". None of Pillow's words are in it."""


def decode_image(
    data: bytes, *, mode: str, max_pixels: int, background: tuple[int, int, int], exif_orientation: bool
) -> Image.Image:
    """The picture in `data`; of an animated one the first frame.

    Args:
        mode: Pillow's name of the colours wanted, "RGB" or "L".
        max_pixels: Width x height, as the file's header claims them, above which nothing is decoded.
        background: What shows through transparent pixels.
        exif_orientation: Turn the picture as its EXIF data says.
    Raises:
        DecodeError: not an image, of a format that is not allowed, too large, truncated or damaged.
    """
    if not data:
        raise DecodeError("is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise DecodeError(f"has more than the {max_pixels} pixels allowed") from None
    except Exception as error:  # Pillow's parsers raise what they meet: OSError, SyntaxError, struct.error, ValueError
        raise DecodeError(_unopened(data)) from error
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise DecodeError(f"is {width}x{height}, more than the {max_pixels} pixels allowed")
        try:
            image.load()
            upright = _upright(image) if exif_orientation else image
            return _flat(upright, mode, background)
        except Exception as error:
            raise DecodeError("is truncated or damaged") from error


def _unopened(data: bytes) -> str:
    if data.startswith(STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return "is truncated or damaged"
    kind = next((name for start, name in OTHERS.items() if data.lstrip()[: len(start)].lower() == start.lower()), None)
    if kind is None and data[4:8] == b"ftyp":
        kind = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC"}.get(data[8:12], "video or HEIF")
    return f"is not an image; {ALLOWED}" if kind is None else f"is {kind}; {ALLOWED}"


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # broken EXIF data says nothing, and the pixels are good
        return image
    turn = TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _flat(image: Image.Image, mode: str, background: tuple[int, int, int]) -> Image.Image:
    """`image` in `mode`: transparency laid over the background, 16 bits cut to the upper 8."""
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16-bit grey at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        base = Image.new("RGBA", layered.size, (*background, 255))
        image = Image.alpha_composite(base, layered).convert("RGB")
    return image if image.mode == mode else image.convert(mode)
