"""Encode video files with ffmpeg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError

# Options of ffmpeg that leave out dates and versions.
DETERMINISTIC = ("-fflags", "+bitexact", "-flags:v", "+bitexact", "-map_metadata", "-1")


def import_ffmpeg(path: Path) -> Any:
    """Import imageio_ffmpeg, for the video file ``path``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise ConfigError(
            f"{path}: video files need imageio-ffmpeg ({error}); pip install imageio-ffmpeg"
        ) from error
    return imageio_ffmpeg


def encoder(
    path: Path,
    size: tuple[int, int],
    fps: float,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: Sequence[str] = ("-crf", "23", "-movflags", "+faststart"),
) -> Any:
    """Start ffmpeg and return a generator that encodes frames.

    Call ``send`` with uint8 [.., H, W, 3], and ``close`` at the end; ``send`` raises OSError if
    ffmpeg has ended. Equal frames give equal files.

    Args:
        path: File to write.
        size: (H, W) in pixels.
        fps: Frames per second.
        codec: Name of ffmpeg's codec; the default is H.264 for browsers.
        pix_fmt: Name of ffmpeg's pixel format.
        options: Further options of ffmpeg.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """
    writer = import_ffmpeg(path).write_frames(
        str(path),
        (size[1], size[0]),
        fps=fps,
        codec=codec,
        pix_fmt_out=pix_fmt,
        quality=None,
        macro_block_size=1,
        output_params=[*options, "-threads", "1", *DETERMINISTIC],
    )
    writer.send(None)
    return writer
