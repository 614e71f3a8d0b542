"""Backend `image`: JPEG, PNG and WebP files in a BYTES tensor become a batch of normalised pixels.

Parameters in config.pbtxt, all optional; height, width and channels are those of the output:

======================  ============================================================================================
`resize_short_side`     shrink or grow until the shorter side has so many pixels, keeping the aspect
`resize`                exact (default without `resize_short_side`): to the output's size, whatever the aspect; none
`resize_filter`         bicubic (default), bilinear, lanczos, nearest; all but nearest antialias when they shrink
`crop`                  centre (default, unless resized exactly) or none: the size must then be right already
`mean`, `scale` `std`   (x - mean) * scale, or (x - mean) / std; x from 0 to 255; one number or one for each channel
`colour`                RGB (default), BGR or L (one channel of brightness)
`layout`                NCHW (default) or NHWC
`exif_orientation`      true (default): turn the picture as the camera says
`alpha`                 what shows through transparent pixels, #ffffff by default
`max_pixels`            width x height an image may have, 50 million by default; checked before anything is decoded
`max_bytes`             size an image file may have, 32 MiB by default
======================  ============================================================================================

Of an animated picture the first frame counts; of 16 bits the upper 8. Colour profiles are not applied.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor

from services.preprocess.decoding import DecodeError, decode_image
from tensorline.config.model import ModelConfig
from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.stage.builtin import Parameters, batched, input_array, only
from tensorline.tensor import BYTES, Array

__all__ = ["ImageInstance", "ImagePlan"]

FILTERS: Final = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}
SIDE_LIMIT: Final = 16_384
PIXEL_LIMIT: Final = 89_478_485
"""Pillow's own bound, above which it warns on stderr for every picture."""

BYTE_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What is done to every picture, as the configuration says. Sizes in pixels."""

    height: int
    width: int
    mode: str
    is_bgr: bool
    is_nhwc: bool
    short_side: int | None
    is_exact: bool
    is_cropped: bool
    resample: Image.Resampling
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    """Both shaped to broadcast over one picture in the output's layout."""
    background: tuple[int, int, int]
    exif_orientation: bool
    max_pixels: int
    max_bytes: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ImagePlan":
        """Raises:
        ConfigError: names the parameter or tensor, what it is and what is allowed.
        """
        p = Parameters(config)
        mode, is_bgr = p.choice("colour", {"RGB": ("RGB", False), "BGR": ("RGB", True), "L": ("L", False)}, "RGB")
        is_nhwc = p.choice("layout", {"NCHW": False, "NHWC": True}, "NCHW")
        height, width = _size(config, len(mode), is_nhwc)
        short_side = p.integer("resize_short_side", 0, 1, SIDE_LIMIT) if "resize_short_side" in p else None
        is_exact = p.choice("resize", {"exact": True, "none": False}, "none" if short_side else "exact")
        is_cropped = p.choice("crop", {"centre": True, "none": False}, "none" if is_exact else "centre")
        if is_exact and (short_side or is_cropped):
            raise ConfigError("parameter 'resize' is 'exact', which leaves nothing for 'resize_short_side' or 'crop'")
        if short_side and is_cropped and short_side < min(height, width):
            raise p.refused("resize_short_side", f"{min(height, width)} and more, to crop {width}x{height} from it")
        if "scale" in p and "std" in p:
            raise ConfigError("parameters 'scale' and 'std' are given, but they say the same thing; leave one out")
        scale = np.array(p.numbers("scale", 1.0, len(mode), zero=False))
        scale = scale / np.array(p.numbers("std", 1.0, len(mode), zero=False))
        channels = (1, 1, -1) if is_nhwc else (-1, 1, 1)
        plan = cls(
            height=height,
            width=width,
            mode=mode,
            is_bgr=is_bgr,
            is_nhwc=is_nhwc,
            short_side=short_side,
            is_exact=is_exact,
            is_cropped=is_cropped,
            resample=p.choice("resize_filter", FILTERS, "bicubic"),
            mean=np.array(p.numbers("mean", 0.0, len(mode)), np.float32).reshape(channels),
            scale=scale.astype(np.float32).reshape(channels),
            background=_colour(p),
            exif_orientation=p.boolean("exif_orientation", default=True),
            max_pixels=p.integer("max_pixels", 50_000_000, 1, PIXEL_LIMIT),
            max_bytes=p.integer("max_bytes", 32 << 20, 1, BYTE_LIMIT),
        )
        p.refuse_unknown()
        return plan

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        """The picture in `data`, of the output's layout and size, its channels in the output's order.

        Raises:
            DecodeError: it cannot be used; the text reads on after "image 3 ".
        """
        if len(data) > self.max_bytes:
            raise DecodeError(f"has {len(data)} bytes, more than the {self.max_bytes} allowed")
        image = decode_image(
            data,
            mode=self.mode,
            max_pixels=self.max_pixels,
            background=self.background,
            exif_orientation=self.exif_orientation,
        )
        array: NDArray[np.uint8] = np.asarray(self._sized(image))
        array = array.reshape(self.height, self.width, len(self.mode))
        if self.is_bgr:
            array = array[:, :, ::-1]
        return array if self.is_nhwc else array.transpose(2, 0, 1)

    def _sized(self, image: Image.Image) -> Image.Image:
        wanted = (self.width, self.height)
        if self.is_exact:
            return image if image.size == wanted else image.resize(wanted, self.resample)
        width, height = scaled = self._scaled(*image.size)
        if self.is_cropped and (width < self.width or height < self.height):
            raise DecodeError(f"is {width}x{height}, too small to crop {self.width}x{self.height} from it")
        if not self.is_cropped and scaled != wanted:
            raise DecodeError(f"is {width}x{height}, not {self.width}x{self.height}, and is not to be cropped")
        # resize(box=) of what the crop keeps takes 0.6 of the time, but Pillow 13 then gives other pixels: in portrait
        # pictures up to 11 of 255 levels, and 0.01 in a score, away from resizing it all first as training did.
        resized = image if scaled == image.size else image.resize(scaled, self.resample)
        left, top = (width - self.width) // 2, (height - self.height) // 2
        return resized if scaled == wanted else resized.crop((left, top, left + self.width, top + self.height))

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        if self.short_side is None:
            return width, height
        short = min(width, height)
        return _rounded(width * self.short_side, short), _rounded(height * self.short_side, short)


def _rounded(dividend: int, divisor: int) -> int:
    """The quotient to the nearest whole number, halves upwards: no float decides over a row of pixels."""
    return (2 * dividend + divisor) // (2 * divisor)


def _size(config: ModelConfig, channels: int, is_nhwc: bool) -> tuple[int, int]:
    """Height and width of the output, whose other dimensions are checked here."""
    output = only(config.outputs, "output", "image")
    shape = batched(config, output)
    image = shape[-3:]
    wanted = f"[height, width, {channels}]" if is_nhwc else f"[{channels}, height, width]"
    if output.datatype != "FP32" or len(shape) not in (3, 4) or shape[:-3] not in ((), (-1,)) or min(image) < 1:
        raise ConfigError(f"output '{output.name}' is {output.datatype} {list(output.dims)}; wanted: FP32 {wanted}")
    *size, got = image if is_nhwc else (*image[1:], image[0])
    if got != channels or max(size) > SIDE_LIMIT:
        raise ConfigError(f"output '{output.name}' has dims {list(output.dims)}; wanted by 'layout': {wanted}")
    height, width = size
    return height, width


def _colour(parameters: Parameters) -> tuple[int, int, int]:
    try:
        red, green, blue, *_ = ImageColor.getrgb(parameters.text("alpha", "#ffffff"))
    except ValueError:
        raise parameters.refused("alpha", "a colour such as #ffffff or white") from None
    return red, green, blue


class ImageInstance:
    """One image file for each row in, pixels out."""

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        # Pillow warns of odd files; a client that sends one is answered, and must not be able to fill a log.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._plan = ImagePlan.from_config(model.config)
        self._input = only(model.config.inputs, "input", "image")
        if self._input.datatype != BYTES:
            raise ConfigError(f"input '{self._input.name}' is {self._input.datatype}; backend 'image' takes BYTES")
        self._input_shape = batched(model.config, self._input)
        self._output = only(model.config.outputs, "output", "image")
        self._output_shape = batched(model.config, self._output)

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        plan, files = self._plan, input_array(batch, self._input.name, BYTES, self._input_shape)
        many = len(self._output_shape) == 4
        if files.size != (files.shape[0] if many and files.ndim else 1):
            raise InvalidTensorError(
                f"input '{self._input.name}' has shape {list(files.shape)}, wanted: one image a row"
            )
        image_shape = self._output_shape[-3:]
        out: NDArray[Any] = batch.empty(self._output.name, "FP32", (files.size, *image_shape) if many else image_shape)
        rows = out if many else out[np.newaxis]
        for index, data in enumerate(files.reshape(-1).tolist()):
            try:
                pixels = plan.pixels(data)
            except DecodeError as error:
                raise InvalidTensorError(f"input '{self._input.name}': image {index} {error}") from error
            np.subtract(pixels, plan.mean, out=rows[index])
            np.multiply(rows[index], plan.scale, out=rows[index])
        return {self._output.name: out}

    def close(self) -> None:
        pass
