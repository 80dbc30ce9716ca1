"""Encode video files with ffmpeg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imageio_ffmpeg


def encoder(
    path: Path,
    size: tuple[int, int],
    fps: float,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: Sequence[str] = ("-crf", "23", "-movflags", "+faststart"),
) -> Any:
    """ffmpeg, as a generator: ``send`` it uint8 [.., H, W, 3], (H, W) = ``size``, and ``close`` it.

    The defaults make H.264 for browsers; ``options`` are further ones of ffmpeg. No dates are written, so equal
    pictures give equal files. ``send`` raises OSError where ffmpeg has ended.
    """
    write_frames: Any = imageio_ffmpeg.write_frames  # its annotations forbid what its documentation allows
    writer = write_frames(
        str(path),
        (size[1], size[0]),
        fps=fps,
        codec=codec,
        pix_fmt_out=pix_fmt,
        quality=None,
        macro_block_size=1,
        output_params=[
            *options,
            *("-threads", "1", "-fflags", "+bitexact", "-flags:v", "+bitexact", "-map_metadata", "-1"),
        ],
    )
    writer.send(None)
    return writer
