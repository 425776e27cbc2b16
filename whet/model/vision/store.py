"""Images that prompts name by their ids: what is known of each, and what of them goes into a forward pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from whet.kernels import dispatch
from whet.model.config import VisionConfig
from whet.model.vision.ids import (
    IMAGE,
    digest_of,
    image_ids,
    key_of,
    key_of_digest,
    place_of,
    with_placeholder,
)
from whet.model.vision.pixels import Preprocessing
from whet.model.vision.tower import Features, Grid
from whet.ranks.fsdp import local
from whet.types import Segment, UserError

CACHE_BYTES = 2**30
PATCHES_TOGETHER = 1024
"""Patches of the images that are computed together, at most, unless one image alone has more."""
AROUND = "<fake_token_around_image>"
"""Idefics 3's token before each view of an image and behind the last."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, read already; its pixels can be had again.

    Attributes:
        digest: SHA-256 of its file's bytes.
        height: Pixels of a column, turned as it is shown.
        width: Pixels of a row.
        read: Returns the pixels, uint8 RGB [height, width, 3].
    """

    digest: bytes
    height: int
    width: int
    read: Callable[[], np.ndarray]

    @classmethod
    def of(cls, data: bytes, picture_HWC: np.ndarray) -> Picture:
        """Make one of a file's bytes and its pixels, which are kept."""
        height, width = picture_HWC.shape[:2]
        return cls(digest_of(data), height, width, lambda: picture_HWC)

    @property
    def key(self) -> int:
        """What its ids name it by."""
        return key_of_digest(self.digest)


class ImageRows(NamedTuple):
    """The images of a flat batch.

    Attributes:
        rows_I: Rows of their tokens.
        features: What is read at these rows.
        positions_N3: Position of every token by time, row and column (M-RoPE); None where images have plain positions.
        spans: First row of each image's tokens and the one behind its last, where they attend to each other in both
            directions; else none.
    """

    rows_I: torch.Tensor
    features: Features
    positions_N3: torch.Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()


class _Run(NamedTuple):
    """Tokens of one view of an image, one after the other."""

    start: int
    grid: Grid


class ImageStore:
    """Knows the images of all prompts of a model.

    Of each it keeps where its pixels come from; patches and features are made when they are needed, and kept while
    they fit.

    Args:
        preprocessing: How pictures are made into patches.
        max_bytes: Memory of patches and features.
    """

    def __init__(self, preprocessing: Preprocessing, max_bytes: int = CACHE_BYTES) -> None:
        self.preprocessing = preprocessing
        self._max_bytes = max_bytes
        self._pictures: dict[int, tuple[Picture, Grid]] = {}
        self._cache: OrderedDict[tuple[object, ...], tuple[torch.Tensor, ...]] = OrderedDict()
        self._num_bytes = 0
        # A server reads a request's images while the model runs for others.
        self._keeping = threading.Lock()

    def __deepcopy__(self, memo: object) -> ImageStore:
        """Share it: a copy of the model sees the same images, and its features are kept under its own weights."""
        return self

    @property
    def config(self) -> VisionConfig:
        """Shape of the tower."""
        return self.preprocessing.vision

    def add(self, picture: Picture) -> tuple[int, ...]:
        """Register an image; return the ids of its placeholder tokens.

        Raises:
            UserError: If the model cannot read an image of this size, or another file has the same key.
        """
        known = self._pictures.get(picture.key)
        if known is not None and known[0].digest != picture.digest:
            raise UserError(
                f"two images have the key {picture.key:012x}: SHA-256 {known[0].digest.hex()} and "
                f"{picture.digest.hex()}; leave one of them out"
            )
        grid = self.preprocessing.grid(picture.height, picture.width) if known is None else known[1]
        ids = image_ids(picture.key, grid.num_tokens)
        if known is None:
            self._pictures[picture.key] = picture, grid
        return ids

    def forget(self, keys: Iterable[int]) -> None:
        """Let go of images that no prompt will be read with; features stay while they fit, for the next time."""
        for key in keys:
            self._pictures.pop(key, None)

    def __contains__(self, key: int) -> bool:
        """Say whether an image is known."""
        return key in self._pictures

    def grid(self, key: int) -> Grid:
        """Return the layout of an image's tokens; UserError if it is not known."""
        return self._known(key)[1]

    def check(self, tokens: Sequence[int], name: str = "the prompt") -> None:
        """Refuse tokens of an image that is not known here, or of a part of one.

        Raises:
            UserError: One line that calls the tokens by `name`.
        """
        ids = torch.tensor(tokens, dtype=torch.int64)
        rows = (ids >= IMAGE).nonzero()[:, 0]
        try:
            self._runs(rows, ids[rows])
        except UserError as error:
            raise UserError(f"{name}: {error}") from None

    def expanded(self, text: str, keys: Sequence[int], name: Callable[[int], str]) -> str:
        """Return a prompt's text with as many placeholder tokens as each image has, as the model's processor does it.

        Args:
            text: What the chat template made: one placeholder for each image.
            keys: The images, in order.
            name: Text of a special token.

        Raises:
            UserError: If the text has not one placeholder for each image.
        """
        start = self.config.start_id
        mark = name(self.config.token_id if start < 0 else start)
        parts = text.split(mark)
        if len(parts) != len(keys) + 1:
            raise UserError(
                f"the prompt's text has {len(parts) - 1} image placeholders ({mark}) for {len(keys)} images: the chat "
                "template must write one for each, and no text of the prompt itself may contain it"
            )
        own = [self._written(self.grid(key), name) for key in keys]
        return parts[0] + "".join(one + part for one, part in zip(own, parts[1:], strict=True))

    def _written(self, grid: Grid, name: Callable[[int], str]) -> str:
        """Return the text of an image."""
        view = name(self.config.token_id) * grid.view
        if self.config.start_id >= 0:
            return f"\n\n{name(self.config.start_id)}{view}{name(self.config.end_id)}\n\n"
        if self.config.projector != "shuffle":
            return view
        rows, columns = grid.tiles
        lines = [
            "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{view}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + "\n" * bool(lines) + f"{AROUND}<global-img>{view}{AROUND}"

    def named(self, tokens: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Return a prompt's ids with those of its images in place of the placeholder token.

        Args:
            tokens: Ids of an `expanded` text.
            keys: Its images, in order.

        Raises:
            UserError: If there are more or fewer placeholder tokens than the images have.
        """
        own = [token for key in keys for token in image_ids(key, self.grid(key).num_tokens)]
        places = [place for place, token in enumerate(tokens) if token == self.config.token_id]
        if len(places) != len(own):
            got = f"{len(places)} placeholder tokens (id {self.config.token_id})"
            raise UserError(
                f"the prompt has {got} for images of {len(own)} tokens: is this the model's own tokenizer?"
            )
        found = list(tokens)
        for place, token in zip(places, own, strict=True):
            found[place] = token
        return found

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt's ids with the placeholder token in place of its images', for a tokenizer to decode."""
        return with_placeholder(tokens, self.config.token_id)

    def patches(self, key: int) -> torch.Tensor:
        """Return an image's patches on the CPU."""
        picture, _ = self._known(key)

        def make() -> tuple[torch.Tensor, ...]:
            with torch.inference_mode(False):  # a sampler may ask first, and training reads what is kept
                return (self.preprocessing.patches(picture.read()),)

        return self._kept(("patches", key), make)[0]

    def features(self, keys: Sequence[int], tower: nn.Module) -> list[Features]:
        """Return what the decoder reads of images: computed once while the tower stays as it is.

        Args:
            keys: The images, each once.
            tower: The model's tower; where it is trained, and gradients are computed, nothing is kept.
        """
        parameters = list(tower.parameters())
        found: dict[int, tuple[torch.Tensor, ...]] = {}
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            for group in self._groups(keys, parameters):
                found.update(zip(group, self._encoded(group, tower, parameters[0].device), strict=True))
        else:
            state = _state(parameters)
            found = {key: made for key in keys if (made := self._get((state, key))) is not None}
            for group in self._groups([key for key in keys if key not in found], parameters):
                # A tensor of inference mode could not be read by training afterwards.
                with torch.inference_mode(False), torch.no_grad():
                    made = self._encoded(group, tower, parameters[0].device)
                for key, own in zip(group, made, strict=True):
                    # A part of a larger tensor would keep all of it.
                    found[key] = tuple(tensor.clone() for tensor in own) if len(group) > 1 else own
                    self._put((state, key), found[key])
        return [Features(found[key][0], found[key][1:]) for key in keys]

    def _groups(self, keys: Sequence[int], parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
        """Yield images that are computed together: each alone, unless its features have the same bits in any company.

        Small images take longer to call the tower for than to compute: a training step with 32 of 64 x 64 pixels takes
        0.35 s together and 0.58 s one by one (model of `whet demo --vision`, one thread).
        """
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        is_free = bool(keys) and dispatch.runs_cpp(self.patches(keys[0]), *matrices)
        groups: dict[Grid, list[int]] = {}
        for key in keys:
            group = groups.setdefault(self.grid(key), [])
            group.append(key)
            if not is_free or len(group) * len(self.patches(key)) >= PATCHES_TOGETHER:
                yield groups.pop(self.grid(key))
        yield from groups.values()

    def _encoded(
        self, keys: Sequence[int], tower: nn.Module, device: torch.device
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return the features of images of one grid."""
        grid, count = self.grid(keys[0]), len(keys)
        patches = [self.patches(key).to(device) for key in keys]
        tokens_ID, deep = tower(torch.cat(patches) if count > 1 else patches[0], grid, count)
        if len(tokens_ID) != grid.num_tokens * count:
            raise AssertionError(f"{len(tokens_ID)} features for {count} images of {grid.num_tokens} tokens")
        return list(zip(*(tensor.chunk(count) for tensor in (tokens_ID, *deep)), strict=True))

    def rows(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        segments: Sequence[Segment],
        tower: nn.Module,
    ) -> ImageRows | None:
        """Return what a forward pass reads of the images among its tokens; None if there are none.

        Args:
            tokens_N: Ids of a flat batch.
            positions_N: Position of each token in its own sequence.
            segments: The sequences; rows behind the last one are padding.
            tower: The model's tower.

        Raises:
            UserError: If an image is not known, or not whole.
        """
        rows_I = (tokens_N >= IMAGE).nonzero()[:, 0]
        if not len(rows_I):
            return None
        if len(tokens_N) < max(segment.start + segment.length for segment in segments):
            raise UserError(
                "parallel.context: ranks that share a sequence cannot read images yet; leave it at 1"
            )
        ids = tokens_N[rows_I].cpu()
        runs = self._runs(rows_I.cpu(), ids)
        keys, which_I = torch.unique(ids.sub(IMAGE) >> 16, return_inverse=True)
        found = self.features(keys.tolist(), tower)
        starts = torch.tensor([0, *(len(f.tokens_ID) for f in found)]).cumsum(0)
        at_I = (starts[which_I] + (ids & 0xFFFF)).to(tokens_N.device)
        deep = zip(*(f.deep for f in found), strict=True)
        features = Features(
            torch.cat([f.tokens_ID for f in found])[at_I], tuple(torch.cat(each)[at_I] for each in deep)
        )
        positions = _positions(positions_N, segments, runs) if self.config.has_positions else None
        spans = [(run.start, run.start + run.grid.view) for run in runs]
        return ImageRows(rows_I, features, positions, tuple(spans) if self.config.is_bidirectional else ())

    def _runs(self, rows_I: torch.Tensor, ids_I: torch.Tensor) -> list[_Run]:
        """Return the whole views among image tokens; UserError if one is not whole."""
        follows = (rows_I.diff() == 1) & (ids_I.diff() == 1)
        firsts = [0, *((~follows).nonzero()[:, 0] + 1).tolist()] if len(rows_I) else []
        found = []
        for first, end in zip(firsts, [*firsts[1:], len(rows_I)], strict=True):
            token = int(ids_I[first])
            grid, place = self.grid(key_of(token)), place_of(token)
            # Views of an image that nothing separates would be one run; in every template something does.
            if end - first != grid.view or place % grid.view or place >= grid.num_tokens:
                raise UserError(
                    f"image {key_of(token):012x} has {grid.view} tokens in one piece, of which {end - first} are here, "
                    f"from number {place} on: an image is read whole or not at all"
                )
            found.append(_Run(int(rows_I[first]), grid))
        return found

    def _known(self, key: int) -> tuple[Picture, Grid]:
        try:
            return self._pictures[key]
        except KeyError:
            raise UserError(
                f"image {key:012x} is not known to this model: whoever reads its prompt registers it first "
                "(model.images.add)"
            ) from None

    def _kept(
        self, key: tuple[object, ...], make: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Return kept tensors, or make them; those that were not used for longest leave when there are too many."""
        found = self._get(key)
        return self._put(key, make()) if found is None else found

    def _get(self, key: tuple[object, ...]) -> tuple[torch.Tensor, ...] | None:
        with self._keeping:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _put(self, key: tuple[object, ...], made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with self._keeping:
            if key not in self._cache:
                self._num_bytes += _size(made)
                self._cache[key] = made
            while self._num_bytes > self._max_bytes and len(self._cache) > 1:
                self._num_bytes -= _size(self._cache.popitem(last=False)[1])
        return made


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _state(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """Return what changes whenever a tower's weights do, or the dtype that products are computed in."""
    kind = parameters[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return autocast, tuple((id(p), p._version, local(p).data_ptr()) for p in parameters)


def _positions(positions_N: torch.Tensor, segments: Sequence[Segment], runs: Sequence[_Run]) -> torch.Tensor:
    """Return positions [N, 3]: text has three equal ones; an image's start where the text before it ends.

    An image takes as many positions as the longer of its sides, fewer than it has tokens. Positions are counted so that
    the text after the last image has its place in the sequence as its position, as if nothing were saved: rotary
    positions matter by their differences alone, and so nobody who reads a completion needs to know of images.

    Source: Qwen2-VL 2409.12191, section 2.1. Deviation: the count starts at what the images save, not at 0.
    """
    found = positions_N[:, None].repeat(1, 3).cpu()
    for segment in segments:
        end, saved = segment.start + segment.length, 0
        own = [run for run in runs if segment.start <= run.start < end]
        if own and segment.shared:
            raise UserError("images behind a shared prompt are not supported: their positions depend on it")
        for run in reversed(own):
            after, grid = run.start + run.grid.view, run.grid
            found[after:end] += saved
            saved += grid.saved
            place = torch.arange(grid.view)
            steps = torch.stack((torch.zeros_like(place), place // grid.columns, place % grid.columns), dim=1)
            found[run.start : after] = found[run.start, 0] + saved + steps
            end = run.start
        found[segment.start : end] += saved
    return found.to(positions_N.device)
