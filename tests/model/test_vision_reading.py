"""Image files are read within limits: what they show, and one clear line for each that cannot be read."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import needs
from PIL import Image

from whet.install import install_command
from whet.model.vision import reading
from whet.model.vision.ids import key_of_digest
from whet.model.vision.reading import read_picture
from whet.types import UserError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def pixels(data: bytes) -> np.ndarray:
    picture = read_picture(uri(data))
    found = picture.read()
    assert found.dtype == np.uint8
    assert found.shape == (picture.height, picture.width, 3)
    return found


def fault(source: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_picture(source, **options).read()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def corners() -> Image.Image:
    """3 wide, 2 high: red at the top left, blue at the top right."""
    image = Image.new("RGB", (3, 2), "white")
    image.putpixel((0, 0), RED)
    image.putpixel((2, 0), BLUE)
    return image


def png(width: int, height: int, body: bytes = b"", *, depth: int = 8, colour: int = 0) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_what_an_image_is(tmp_path: Path) -> None:
    """Its digest and size are known without its pixels, which are read again whenever they are asked for."""
    data = encoded(corners())
    (tmp_path / "a.png").write_bytes(data)
    for source, root in ((uri(data), None), ("a.png", tmp_path), (str(tmp_path / "a.png"), None)):
        picture = read_picture(source, root=root)
        assert (picture.height, picture.width) == (2, 3)
        assert picture.digest == hashlib.sha256(data).digest()
        assert picture.key == key_of_digest(picture.digest)
        for _ in range(2):
            assert picture.read().tolist() == [[[*RED], [*WHITE], [*BLUE]], [[*WHITE]] * 3]
    (tmp_path / "a.png").write_bytes(encoded(corners().resize((6, 4))))
    with pytest.raises(UserError, match="the file has changed since the run read it first"):
        picture.read()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_by_content_and_not_by_name(kind: str, tmp_path: Path) -> None:
    data = encoded(Image.new("RGB", (40, 30), GREEN), kind)
    (tmp_path / "wrong.txt").write_bytes(data)
    found = read_picture("wrong.txt", root=tmp_path).read()
    assert found.shape == (30, 40, 3)
    assert np.abs(found.astype(int) - GREEN).max() <= 3  # JPEG and WebP lose a little
    assert read_picture(uri(data, "x-unknown")).height == 30


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_as_exif_says(orientation: int) -> None:
    """An independent statement: where the red and the blue corner of the file are shown, by the EXIF standard 4.6.4."""
    top_left = {
        1: (0, 0),
        2: (0, -1),
        3: (-1, -1),
        4: (-1, 0),
        5: (0, 0),
        6: (0, -1),
        7: (-1, -1),
        8: (-1, 0),
    }
    top_right = {
        1: (0, -1),
        2: (0, 0),
        3: (-1, 0),
        4: (-1, -1),
        5: (-1, 0),
        6: (-1, -1),
        7: (0, -1),
        8: (0, 0),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "TIFF", "WEBP"):  # without loss
        found = pixels(encoded(corners(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})))
        assert found.shape == ((2, 3, 3) if orientation < 5 else (3, 2, 3))
        assert tuple(found[top_left[orientation]]) == RED
        assert tuple(found[top_right[orientation]]) == BLUE


def test_broken_exif_turns_nothing() -> None:
    exif = b"Exif\x00\x00II*\x00\xff\xff\xff\xff"
    assert pixels(encoded(corners(), exif=exif)).shape == (2, 3, 3)
    wrong = Image.Exif()
    wrong[0x0112] = 77
    assert pixels(encoded(corners(), exif=wrong)).shape == (2, 3, 3)


def test_modes() -> None:
    """Grey, palette, CMYK and 16 bits become RGB of 8; what is transparent is white."""
    grey = Image.new("L", (2, 1))
    grey.putdata([0, 200])
    assert pixels(encoded(grey)).tolist() == [[[0, 0, 0], [200, 200, 200]]]
    assert pixels(encoded(Image.new("1", (2, 1), 1))).tolist() == [[[255] * 3] * 2]
    palette = corners().convert("P", palette=Image.Palette.ADAPTIVE)
    assert tuple(pixels(encoded(palette))[0, 0]) == RED
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(pixels(encoded(cmyk, "JPEG")).astype(int) - RED).max() <= 3
    assert tuple(pixels(encoded(cmyk, "TIFF"))[0, 0]) == RED
    deep = Image.fromarray(np.array([[0, 0x80FF, 0xFFFF]], dtype=np.uint16))
    assert pixels(encoded(deep))[0, :, 0].tolist() == [0, 0x80, 0xFF]
    rows = b"\x00" + struct.pack(">HHH", 0xFFFF, 0x1234, 0)  # 16 bits a channel, RGB
    assert pixels(png(1, 1, zlib.compress(rows), depth=16, colour=2)).tolist() == [[[0xFF, 0x12, 0]]]
    half = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert pixels(encoded(half)).tolist() == [[[*WHITE]]]
    half.putpixel((0, 0), (0, 0, 0, 128))
    assert pixels(encoded(half)).tolist() == [[[127] * 3]]  # 255 * (1 - 128 / 255)
    assert pixels(encoded(Image.new("LA", (1, 1), (9, 0)))).tolist() == [[[*WHITE]]]
    gif = Image.new("P", (1, 1), 1)
    gif.putpalette([0, 0, 0, 255, 0, 0])
    assert tuple(pixels(encoded(gif, "GIF", transparency=1))[0, 0]) == WHITE
    assert "floating-point numbers" in fault(uri(encoded(Image.new("F", (2, 2), 0.5), "TIFF")))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE, GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert {tuple(pixel) for row in pixels(data) for pixel in row} == {RED}


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("was decoded")

    monkeypatch.setattr(reading, "_decode", never)
    side = 30_000
    bomb = png(side, side, zlib.compress(bytes(1 << 20), 9))
    begin = time.monotonic()
    assert "far too many pixels, expected at most 67,108,864; make it smaller" in fault(uri(bomb))
    assert "10,000 x 10,000 pixels, expected at most 67,108,864" in fault(uri(png(10_000, 10_000)))
    assert "1 x 100,000,000 pixels" in fault(uri(png(1, 100_000_000)))
    assert "pixels" in fault(uri(png(2**31 - 1, 2**31 - 1)))
    gif = encoded(Image.new("P", (9, 9)), "GIF")
    gif = gif[:6] + struct.pack("<HH", 65535, 65535) + gif[10:]
    assert "pixels" in fault(uri(gif))
    webp = encoded(corners(), "WEBP", save_all=True, append_images=[Image.new("RGB", (3, 2))])
    assert webp[12:16] == b"VP8X"
    webp = webp[:24] + struct.pack("<I", 16382)[:3] * 2 + webp[30:]  # of its canvas; the frames are small
    assert "far too many pixels" in fault(uri(webp))
    assert time.monotonic() - begin < 20


@needs("linux")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A small file that unpacks to gigabytes (text, profile, pixels) takes no more than its limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = zlib.compress(bytes(1 << 28), 9)  # 256 MiB in 256 KiB

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    image = encoded(Image.new("RGB", (2, 2), RED))
    for extra in (chunk(b"zTXt", b"a\x00\x00" + packed), chunk(b"iCCP", b"a\x00\x00" + packed)):
        data = image[:33] + extra + image[33:]
        with contextlib.suppress(UserError):
            assert tuple(pixels(data)[0, 0]) == RED
    assert "broken" in fault(uri(png(8000, 8000, b"")))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 700, grown


def test_files_that_are_no_images(tmp_path: Path) -> None:
    text = "not an image (starts with b'hello wo'); expected one of BMP, GIF, JPEG, PNG, TIFF, WEBP"
    assert text in fault(uri(b"hello world"))
    assert "SVG or XML" in fault(uri(b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'))
    assert "was an error page saved?" in fault(uri(b"<!DOCTYPE html><html>404</html>"))
    assert "git-lfs pointer: run git lfs pull" in fault(uri(b"version https://git-lfs.github.com/spec/v1\n"))
    assert "PDF" in fault(uri(b"%PDF-1.7\n"))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/tmp/x) (w) file\n"
    assert "PostScript" in fault(uri(postscript))  # Pillow would start Ghostscript
    (tmp_path / "empty.png").write_bytes(b"")
    assert "empty; give an image file" in fault("empty.png", root=tmp_path)
    assert "its header is broken, or it has no pixels" in fault(uri(png(0, 5)))
    bitmap = encoded(corners(), "BMP")
    assert "or it has no pixels" in fault(uri(bitmap[:18] + bytes(8) + bitmap[26:]))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_and_damaged(kind: str) -> None:
    """Any prefix and any flipped byte gives an image or one line; half of the pixels is never taken for all."""
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    for part in (0.97, 0.5, 0.2, 0.05):
        assert fault(uri(data[: int(len(data) * part)])).startswith("image data:image/png;base64,")
    for place in generator.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with contextlib.suppress(UserError):
            assert read_picture(uri(bytes(damaged))).read().dtype == np.uint8


def test_data_uris() -> None:
    data = base64.b64encode(encoded(corners())).decode()
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:image/png;charset=utf-8;BASE64,"):
        assert read_picture(head + data).width == 3
    assert read_picture(f"data:image/png;base64,{data[:20]}\n{data[20:]}").width == 3
    assert "expected a data URI such as" in fault("data:image/png," + data)
    assert "not base64" in fault("data:image/png;base64,$$$$")
    assert "not base64" in fault("data:image/png;base64," + data[:-1])
    assert "empty" in fault("data:image/png;base64,")
    large = "data:image/png;base64," + "A" * (reading.MAX_BYTES * 4 // 3 + 2000)
    assert fault(large).startswith("image data:image/png;base64,... (44,741,")
    assert "larger than 32 MiB" in fault(large)


def test_paths_stay_in_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "secret.png"
    root.mkdir()
    (tmp_path / "data2").mkdir()
    for path in (outside, root / "in.png", tmp_path / "data2/x.png"):
        path.write_bytes(encoded(corners()))
    (root / "link.png").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path / "data2")
    (root / "fine.png").symlink_to(root / "in.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    for good in ("in.png", "./in.png", "x/../in.png", "fine.png", str(root / "in.png")):
        assert read_picture(good, root=root).width == 3
    inside_of_none = ("../secret.png", "../data2/x.png", "link.png", "folder/x.png", str(outside))
    for bad in (*inside_of_none, "/etc/passwd", "file:///etc/passwd"):
        text = fault(bad, root=root)
        assert f"is outside of {str(root)!r}" in text
        assert "--task.image-root" in text
    assert read_picture(str(outside)).width == 3  # without a root any path is taken
    assert "cannot be read (No such file or directory); check the path" in fault("no.png", root=root)
    for bad in ("loop.png", "x" * 5000):
        assert "image" in fault(bad, root=root)
    for bad in ("", "  ", "a\x00b", "ftp://example.org/a.png"):
        assert "expected a path, a data URI" in fault(bad, root=root)
    assert "is a path, and files are not read here" in fault("in.png", root=root, paths=False)


@needs("pipes")
@pytest.mark.timeout(20)
def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    assert "a pipe, not a file" in fault("pipe.png", root=tmp_path)
    assert "folder" in fault("folder.png", root=tmp_path) or "directory" in fault("folder.png", root=tmp_path)
    assert "a device, not a file" in fault("/dev/zero")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(10 * 2**30)  # sparse
    assert "larger than 32 MiB; make it smaller" in fault("large.png", root=tmp_path)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert fault(uri(b"x")) == f"images need Pillow: {install_command('vision')}"


class Images(BaseHTTPRequestHandler):
    """A server of images, of which some never end."""

    data = encoded(corners())
    count = 0

    def do_GET(self) -> None:
        type(self).count += 1
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", f"{self.path[6:]}://localhost/etc/passwd")
            self.end_headers()
        elif self.path == "/none":
            self.send_error(404)
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(50):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            for _ in range(64):
                self.wfile.write(bytes(1 << 16))
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>" if self.path == "/page" else self.data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Images) as there:
        thread = threading.Thread(target=there.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{there.server_port}"
        there.shutdown()


def test_urls(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched only where it is allowed, once, within limits; a data set never reaches the local network by itself."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Images.count = 0
    good = f"{server}/a.png"
    assert "is a URL, and URLs are not fetched here; allow it with --task.image-urls public" in fault(good)
    text = fault(good, urls="public")
    assert "127.0.0.1 is 127.0.0.1, an address of this machine or network" in text
    assert "--task.image-urls any" in text
    assert Images.count == 0
    for _ in range(2):
        assert read_picture(good, urls="any").read().shape == (2, 3, 3)
    assert Images.count == 1
    assert "could not be downloaded (HTTP Error 404: Not Found)" in fault(f"{server}/none", urls="any")
    assert "could not be downloaded (HTTP Error 302" in fault(f"{server}/away/file", urls="any")
    assert "could not be downloaded (redirected to 'ftp://" in fault(f"{server}/away/ftp", urls="any")
    assert "was an error page saved?" in fault(f"{server}/page", urls="any")
    monkeypatch.setattr(reading, "MAX_BYTES", 1 << 18)
    assert "larger than 0 MiB" in fault(f"{server}/endless", urls="any")
    monkeypatch.setattr(reading, "TIMEOUT_S", 0.3)
    assert "not complete after 0.3 s" in fault(f"{server}/slow", urls="any")
    assert "could not be downloaded" in fault("http://127.0.0.1:1/x", urls="any")
    kept = sorted(path.name[:4] for path in (tmp_path / "whet/images").iterdir())
    assert kept == ["url-"]
