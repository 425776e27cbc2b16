"""Image files from anywhere, read within limits: untrusted data sets and requests name them.

A source is a path, a data URI that holds the file itself, or a URL. All of a file's limits are checked before its
pixels are decoded; a file that is not an image, is broken or too large is one clear line, never a crash.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import http.client
import io
import ipaddress
import os
import re
import stat
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from urllib.parse import urlsplit

import numpy as np

from whet.config import cache_folder
from whet.install import install_command
from whet.model.vision.ids import digest_of
from whet.types import UserError

if TYPE_CHECKING:
    from whet.model.vision.store import Picture

MAX_BYTES = 32 * 2**20
"""Largest file."""
MAX_PIXELS = 2**26
"""Most pixels of an image: 192 MiB as RGB. Phones' largest photographs have about 50 million."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats by Pillow's names. None starts another program, as PostScript would."""
TIMEOUT_S = 20.0
"""Longest time that one download takes."""
MAX_SHOWN = 80

Urls = Literal["none", "public", "any"]
"""Which URLs are fetched: none; those of the public internet; any, so also those of the local network."""

_DATA_URI = re.compile(r"data:(?P<kind>[^;,]*)(?:;[^;,]*)*?;base64,", re.IGNORECASE)
FILE = "file://"
"""May stand before a path, as in Qwen's own examples."""
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*", b"RIFF", b"BM")
_ORIENTATION = 0x0112
_TRANSPOSED = frozenset({5, 6, 7, 8})


def shown(source: str) -> str:
    """Return a source as errors name it: the beginning of a data URI, else all of it up to a limit."""
    if source[:5].lower() == "data:":
        return f"{source.partition(',')[0][:MAX_SHOWN]},... ({len(source):,} characters)"
    return repr(source if len(source) <= MAX_SHOWN else f"{source[:MAX_SHOWN]}...")


def is_url(source: str) -> bool:
    """Say whether a source is to be fetched."""
    return source[:8].lower().startswith(("http://", "https://"))


def is_data_uri(source: str) -> bool:
    """Say whether a source holds the file itself."""
    return source[:5].lower() == "data:"


def read_picture(
    source: str, *, root: str | Path | None = None, paths: bool = True, urls: Urls = "none"
) -> Picture:
    """Read what an image is; its pixels are decoded when they are needed.

    The image is turned as its EXIF data says, transparent parts are white, and of an animation the first frame is read.

    Args:
        source: Path, data URI or URL.
        root: Folder that paths are relative to, and which they may not leave; None takes any path.
        paths: Whether paths are read at all; a server reads none of its clients'.
        urls: Which URLs are fetched.

    Raises:
        UserError: If it cannot be read.
    """
    from whet.model.vision.store import Picture  # with torch, which tasks alone do not need

    name = shown(source)
    if is_data_uri(source):
        data = decoded(source)
        load: Callable[[], bytes] = partial(decoded, source)
    else:
        path = locate(source, root=root, paths=paths, urls=urls)
        data = file_bytes(path, name)
        load = partial(file_bytes, path, name)
    digest = digest_of(data)
    height, width = size_of(data, name)

    def read() -> np.ndarray:
        again = load()
        if digest_of(again) != digest:
            raise UserError(f"image {name}: the file has changed since the run read it first; restore it")
        return pixels_of(again, name)

    return Picture(digest, height, width, read)


def locate(source: str, *, root: str | Path | None = None, paths: bool = True, urls: Urls = "none") -> Path:
    """Return the file of a source that is a path, or a URL, which is fetched.

    Args:
        source: Path or URL.
        root: Folder that paths are relative to and may not leave, symbolic links followed; None takes any path.
        paths: Whether paths are read at all.
        urls: Which URLs are fetched.

    Raises:
        UserError: If it is not permitted, or there is no such file.
    """
    name = shown(source)
    if is_url(source):
        if urls == "none":
            remedy = "allow it with --task.image-urls public, or give the file" if paths else "send the file"
            raise UserError(f"image {name} is a URL, and URLs are not fetched here; {remedy} as a data URI")
        return fetch(source, urls)
    if not paths:
        raise UserError(f"image {name} is a path, and files are not read here; send it as a data URI")
    if not source.strip() or "\x00" in source or "://" in source.removeprefix(FILE):
        raise UserError(f"image {name}: expected a path, a data URI (data:image/png;base64,...) or a URL")
    source = source.removeprefix(FILE)
    base = Path() if root is None else Path(root)
    try:
        found = (base / source).resolve()
        if root is not None and not found.is_relative_to(base.resolve()):
            raise UserError(
                f"image {name} is outside of {str(root)!r}; move it there, or name a folder that holds all images with "
                "--task.image-root"
            )
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # loops of links, names that are too long
        raise UserError(f"image {name}: not a path that can be followed ({error}); check it") from None
    return found


@contextlib.contextmanager
def _file(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a regular file of a permitted size; a pipe or a device is never waited for."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(number, "rb") as file:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode):
                raise UserError(f"image {name}: {_kind(about.st_mode)}, not a file; give an image file")
            if about.st_size > MAX_BYTES:
                raise UserError(f"image {name}: larger than {MAX_BYTES >> 20} MiB; make it smaller")
            yield file
    except OSError as error:
        raise UserError(f"image {name}: cannot be read ({error.strerror or error}); check the path") from None


def file_bytes(path: Path, name: str) -> bytes:
    """Return the content of a file within the limits.

    Raises:
        UserError: If there is no such file, or it is not permitted.
    """
    with _file(path, name) as file:
        return _checked(file.read(MAX_BYTES + 1), name)


def check_file(path: Path, name: str) -> tuple[int, int]:
    """Return the height and width of an image file as it is shown, from its first and last bytes where they will do.

    Raises:
        UserError: If there is no such file, it is not an image, cut off, or too large.
    """
    with _file(path, name) as file:
        _checked(file.read(1), name)
        file.seek(0)
        size = size_of(file, name)
        _check_whole(file, name)
        return size


def check_bytes(data: bytes, name: str) -> tuple[int, int]:
    """Return the height and width of an image that is given as the bytes of its file, as `check_file` does."""
    size = size_of(_checked(data, name), name)
    _check_whole(io.BytesIO(data), name)
    return size


def _check_whole(file: BinaryIO, name: str) -> None:
    """Refuse a file that ends too early, long before a run needs its pixels.

    A file that ends as its format does is taken for whole; the pixels of any other are decoded.
    """
    file.seek(0)
    start = file.read(12)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 64))
    tail = file.read()
    ends = {b"\x89PNG": b"IEND", b"\xff\xd8\xff": b"\xff\xd9", b"GIF8": b";"}
    mark = next((mark for magic, mark in ends.items() if start.startswith(magic)), b"")
    is_whole = bool(mark) and mark in tail
    if start[:4] == b"RIFF":
        is_whole = int.from_bytes(start[4:8], "little") + 8 <= size
    if not is_whole:
        file.seek(0)
        pixels_of(file.read(MAX_BYTES + 1), name)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((word for test, word in kinds if test(mode)), "a device")


def decoded(source: str) -> bytes:
    """Return the content of a data URI within the limits.

    Raises:
        UserError: If it is malformed, or too large.
    """
    name = shown(source)
    head = _DATA_URI.match(source[:1000])
    if head is None:
        raise UserError(f"image {name}: expected a data URI such as data:image/png;base64,iVBORw0KGgo...")
    if len(source) > MAX_BYTES * 4 // 3 + 1000:
        raise UserError(f"image {name}: larger than {MAX_BYTES >> 20} MiB; make it smaller")
    try:
        data = base64.b64decode("".join(source[head.end() :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"image {name}: not base64 ({error}); encode the file again") from None
    return _checked(data, name)


def _checked(data: bytes, name: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise UserError(f"image {name}: larger than {MAX_BYTES >> 20} MiB; make it smaller")
    if not data:
        raise UserError(f"image {name}: empty; give an image file")
    return data


# --- pixels ---------------------------------------------------------------------------------------------------------


def size_of(data: bytes | BinaryIO, name: str) -> tuple[int, int]:
    """Return the height and width of an image file as it is shown, without decoding its pixels.

    Raises:
        UserError: If it is not an image of the formats that are read, or too large.
    """
    return _opened(data, name, lambda image: _turned(image.size, _orientation(image)))


def pixels_of(data: bytes, name: str) -> np.ndarray:
    """Return the pixels of an image file as it is shown, uint8 RGB [height, width, 3].

    Raises:
        UserError: If it is not an image of the formats that are read, too large, or broken.
    """
    return _opened(data, name, _decode)


def _opened(data: bytes | BinaryIO, name: str, use: Callable[[Any], Any]) -> Any:
    """Open a file's bytes with Pillow, check its size, and use it; whatever Pillow raises becomes one line."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError(f"images need Pillow: {install_command('vision')}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs, which are checked here, and of odd metadata
            file = io.BytesIO(data) if isinstance(data, bytes) else data
            with Image.open(file, formats=FORMATS) as image:
                width, height = image.size
                if not min(width, height) > 0:
                    raise UserError(f"image {name}: {width} x {height} pixels, so it has none; leave it out")
                if width * height > MAX_PIXELS:
                    raise _too_large(name, f"{width:,} x {height:,} pixels")
                return use(image)
    except UserError:
        raise
    except UnidentifiedImageError:
        start = data[:200] if isinstance(data, bytes) else _start(data)
        if start.startswith(_MAGIC):
            raise UserError(
                f"image {name}: its header is broken, or it has no pixels; replace it or leave it out"
            ) from None
        raise UserError(
            f"image {name}: not an image ({_looks_like(start)}); expected one of {', '.join(FORMATS)}"
        ) from None
    except Image.DecompressionBombError:
        raise _too_large(name, "far too many pixels") from None
    except MemoryError:
        raise UserError(f"image {name}: there is not enough memory to decode it; make it smaller") from None
    except Exception as error:  # decoders of untrusted files raise errors of many kinds
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"image {name}: broken ({text}); replace it or leave it out") from None


def _start(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(200)


def _too_large(name: str, got: str) -> UserError:
    return UserError(f"image {name}: {got}, expected at most {MAX_PIXELS:,}; make it smaller")


def _looks_like(data: bytes) -> str:
    """Describe a file by its first bytes."""
    start = data[:200].lstrip()
    if start[:5].lower() in (b"<?xml", b"<svg ") or b"<svg" in start.lower():
        return "SVG or XML"
    if start[:1] == b"<":
        return "HTML or XML: was an error page saved?"
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer: run git lfs pull"
    known = {b"%PDF": "PDF", b"%!PS": "PostScript", b"PK": "a zip file", b"\x00\x00\x00": "a video or HEIC"}
    return next(
        (word for magic, word in known.items() if data.startswith(magic)), f"starts with {data[:8]!r}"
    )


def _orientation(image: Any) -> int:
    """Return how the image is to be turned (EXIF, 1 to 8); broken EXIF data turns nothing."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return (
            1  # Pillow turns TIFF itself; in PNG it would decode all pixels to look for the data behind them
        )
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    width, height = size
    return (width, height) if orientation in _TRANSPOSED else (height, width)


def _decode(image: Any) -> np.ndarray:
    """Decode the first frame, bring its pixels to 8-bit RGB on white, and turn it as it is shown."""
    from PIL import Image

    orientation, size = _orientation(image), image.size
    image.load()
    if image.size != size:
        raise ValueError(f"its header says {size}, its pixels {image.size}")
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = Image.fromarray(_eight_bits(image))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        image = Image.new("RGBA", size, "white")
        image.alpha_composite(clear)
    image = image.convert("RGB")
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation)
    return np.asarray(image if turn is None else image.transpose(turn))


def _eight_bits(image: Any) -> np.ndarray:
    """Return the upper eight bits of grey pixels of sixteen; Pillow's own conversion would clip them to white."""
    values = np.asarray(image)
    if values.dtype.kind == "f":
        raise ValueError("its pixels are floating-point numbers, whose range is not known")
    if values.min() < 0 or values.max() >= 1 << 16:
        raise ValueError("its pixels have more than 16 bits")
    return (values >> 8).astype(np.uint8)


# --- URLs -----------------------------------------------------------------------------------------------------------


def images_folder() -> Path:
    """Return the folder of image files that were fetched, or stood in rows of data."""
    return cache_folder() / "images"


def stored(data: bytes) -> Path:
    """Write an image file to the cache under the digest of its content, whole or not at all."""
    path = images_folder() / hashlib.sha256(data).hexdigest()
    return _written(path, data)


def _written(path: Path, data: bytes) -> Path:
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial_path = path.with_name(f".{path.name}.{os.getpid()}")
            partial_path.write_bytes(data)
            partial_path.replace(path)
        except OSError as error:
            raise UserError(
                f"{path.parent}: images cannot be kept there ({error.strerror or error}); set XDG_CACHE_HOME to a "
                "folder that can be written"
            ) from None
    return path


def fetch(url: str, urls: Urls = "public") -> Path:
    """Download an image to the cache, once, within limits of size and time.

    Args:
        url: Its http or https address.
        urls: 'public' refuses addresses of this machine and the local network, also behind a redirection.

    Raises:
        UserError: If it cannot be downloaded, or is not an image.
    """
    name = shown(url)
    link = images_folder() / f"url-{hashlib.sha256(url.encode()).hexdigest()}"
    if link.is_file():
        return link
    data = _checked(_downloaded(url, name, urls), name)
    size_of(data, name)
    return _written(link, data)


class _LocalAddressError(OSError):
    """A server is of this machine or the local network."""


def _downloaded(url: str, name: str, urls: Urls) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "whet", "Accept": "image/*"})
    end = time.monotonic() + TIMEOUT_S
    try:
        with _opener(urls).open(request, timeout=TIMEOUT_S) as response:
            data = bytearray()
            while len(data) <= MAX_BYTES and (part := response.read1(1 << 16)):
                data += part
                if time.monotonic() > end:  # the timeout alone is of each read
                    raise TimeoutError(f"not complete after {TIMEOUT_S:g} s")
            return bytes(data)
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_status = isinstance(error, urllib.error.HTTPError)
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        reason = error.reason if isinstance(error, urllib.error.URLError) and not is_status else error
        if isinstance(reason, _LocalAddressError):
            raise UserError(f"image {name}: {reason}; to read from there: --task.image-urls any") from None
        raise UserError(f"image {name}: could not be downloaded ({str(reason)[:120]})") from None


class _NoOtherScheme(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("http", "https"):
            fp.close()
            raise urllib.error.URLError(f"redirected to {shown(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(urls: Urls) -> urllib.request.OpenerDirector:
    """Return what opens URLs; a proxy, where one is set, decides itself what it fetches."""
    handlers: list[Any] = [_NoOtherScheme]
    if urls == "public" and not {"http", "https", "all"} & urllib.request.getproxies().keys():
        handlers += [_PublicHTTP, _PublicHTTPS]
    return urllib.request.build_opener(*handlers)


def _check_peer(connection: http.client.HTTPConnection) -> None:
    """Refuse a server of the local network, by the address that is connected to: names may be resolved anew."""
    peer = connection.sock.getpeername()[0].partition("%")[0]
    address = ipaddress.ip_address(peer)
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_global or address.is_multicast:
        connection.close()
        raise _LocalAddressError(f"{connection.host} is {address}, an address of this machine or network")


class _PublicConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _check_peer(self)


class _PublicTLSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _check_peer(self)


class _PublicHTTP(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(_PublicConnection, req)


class _PublicHTTPS(urllib.request.HTTPSHandler):
    def https_open(self, req: Any) -> Any:
        return self.do_open(_PublicTLSConnection, req)
