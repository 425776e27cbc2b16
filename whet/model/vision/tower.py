"""What turns an image into embeddings: a tower of transformer layers over patches, and a projection.

Parameters have the names of Hugging Face's modules (`whet.model.vision.shapes` maps what stands before them). Images of
one size may be computed together (`ImageStore.features` says when): no operation here mixes two of them, and where each
of an operation's rows has the same bits whatever the others are, so have an image's features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import dispatch, eager
from whet.model.config import VisionConfig
from whet.model.parts import Linear, RMSNorm, embedding
from whet.model.rotary import Angles, turn


class Grid(NamedTuple):
    """Layout of an image's placeholder tokens.

    Attributes:
        rows: Rows of placeholder tokens.
        columns: Tokens of a row.
        tiles: Rows and columns of tiles that are looked at before the whole image, each as large as that.
    """

    rows: int
    columns: int
    tiles: tuple[int, int] = (0, 0)

    @property
    def view(self) -> int:
        """Tokens of the whole image, or of one tile."""
        return self.rows * self.columns

    @property
    def views(self) -> int:
        """Tiles, and the whole image."""
        return self.tiles[0] * self.tiles[1] + 1

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens."""
        return self.view * self.views

    @property
    def saved(self) -> int:
        """Positions that the tokens take less than others do, where rows and columns are positions (M-RoPE)."""
        return self.view - max(self.rows, self.columns)


class Features(NamedTuple):
    """What the decoder reads of an image.

    Attributes:
        tokens_ID: Embeddings of its placeholder tokens, in order.
        deep: What is added to their residual stream after the first layers, one by one; each [I, D].
    """

    tokens_ID: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of the last axis, with weights that are loaded or drawn."""

    def reset_parameters(self) -> None:
        """Leave the weights at 1 and 0."""
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.bias.fill_(0.0)


class Patches(nn.Module):
    """The product of a patch's pixels, stored as a convolution's weights."""

    def __init__(self, config: VisionConfig, *, has_bias: bool) -> None:
        super().__init__()
        side = (config.patch_size, config.patch_size)
        frames = (config.frames,) if config.frames else ()
        self.weight = nn.Parameter(torch.empty(config.width, 3, *frames, *side))
        self.bias = nn.Parameter(torch.zeros(config.width)) if has_bias else None

    def forward(self, pixels_IX: torch.Tensor) -> torch.Tensor:
        """Return embeddings [I, D] of flat patches."""
        bias = self.bias
        return dispatch.run(eager.linear, pixels_IX.to(self.weight.dtype), self.weight.flatten(1), bias)


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return an activation by the name that Hugging Face gives it."""
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh" if name.endswith("tanh") else "none")


def attend(
    q_IHC: torch.Tensor, k_IHC: torch.Tensor, v_IHC: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Return attention [I, H C] of all patches to all within runs of these lengths."""
    if len(set(lengths)) > 1:
        parts = zip(*(x.split(list(lengths)) for x in (q_IHC, k_IHC, v_IHC)), strict=True)
        return torch.cat([attend(*part, lengths=(part[0].shape[0],)) for part in parts])
    q, k, v = (
        x.to(v_IHC.dtype).unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q_IHC, k_IHC, v_IHC)
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1)


# --- Qwen2.5-VL and Qwen3-VL ---------------------------------------------------------------------------------------


class QwenAttention(nn.Module):
    """Attention of patches with two-dimensional rotary positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.proj = Linear(config.width, config.width)

    def forward(self, x_ID: torch.Tensor, angles: Angles, lengths: tuple[int, ...]) -> torch.Tensor:
        """Attend within runs of patches of these lengths."""
        q, k, v = self.qkv(x_ID).view(x_ID.shape[0], 3, self.heads, -1).unbind(1)
        q, k = (turn(x.contiguous(), angles, is_interleaved=False) for x in (q, k))
        return self.proj(attend(q, k, v, lengths))


class QwenMLP(nn.Module):
    """Feed-forward part: gated in Qwen2.5-VL, plain in Qwen3-VL."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation, self.is_gated = config.activation, config.is_rms
        width, inner = config.width, config.intermediate_size
        if self.is_gated:
            self.gate_proj, self.up_proj = Linear(width, inner), Linear(width, inner)
            self.down_proj = Linear(inner, width)
        else:
            self.linear_fc1, self.linear_fc2 = Linear(width, inner), Linear(inner, width)

    def forward(self, x_ID: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        if self.is_gated:
            return self.down_proj(activate(self.activation, self.gate_proj(x_ID)) * self.up_proj(x_ID))
        return self.linear_fc2(activate(self.activation, self.linear_fc1(x_ID)))


class QwenBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.attn, self.mlp = QwenAttention(config), QwenMLP(config)

    def forward(self, x_ID: torch.Tensor, angles: Angles, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x_ID = x_ID + self.attn(self.norm1(x_ID), angles, lengths)
        return x_ID + self.mlp(self.norm2(x_ID))


def _norm(config: VisionConfig) -> nn.Module:
    width, eps = config.width, config.norm_eps
    return RMSNorm(width, eps) if config.is_rms else LayerNorm(width, eps=eps)


class QwenMerger(nn.Module):
    """Make one placeholder token's embedding of a square of patches.

    Args:
        config: Shape of the tower.
        is_deep: Whether its output goes into a decoder's layer; then the whole square is normalised at once.
    """

    def __init__(self, config: VisionConfig, *, is_deep: bool = False) -> None:
        super().__init__()
        self.whole, self.is_deep = config.width * config.merge**2, is_deep
        if config.is_rms:
            self.ln_q = RMSNorm(config.width, config.norm_eps)
            self.mlp = nn.Sequential(
                Linear(self.whole, self.whole), nn.GELU(), Linear(self.whole, config.out_width)
            )
        else:
            self.norm = LayerNorm(self.whole if is_deep else config.width, eps=config.norm_eps)
            self.linear_fc1 = Linear(self.whole, self.whole)
            self.linear_fc2 = Linear(self.whole, config.out_width)

    def forward(self, x_ID: torch.Tensor) -> torch.Tensor:
        """Return embeddings, one for each square."""
        if hasattr(self, "ln_q"):
            return self.mlp(self.ln_q(x_ID).view(-1, self.whole))
        x_ID = self.norm(x_ID.view(-1, self.whole) if self.is_deep else x_ID).view(-1, self.whole)
        return self.linear_fc2(F.gelu(self.linear_fc1(x_ID)))


class QwenTower(nn.Module):
    """The tower of Qwen2.5-VL and Qwen3-VL: images of any size, a position for each row and column of patches.

    Args:
        config: Its shape.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.ModuleDict({"proj": Patches(config, has_bias=not config.is_rms)})
        if config.positions:
            self.pos_embed = embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(QwenBlock(config) for _ in range(config.num_layers))
        self.merger = QwenMerger(config)
        if config.deep:
            self.deepstack_merger_list = nn.ModuleList(QwenMerger(config, is_deep=True) for _ in config.deep)

    def forward(self, pixels_IX: torch.Tensor, grid: Grid, count: int = 1) -> Features:
        """Encode images of one size.

        Args:
            pixels_IX: Their patches, normalised, image by image, square by square (`whet.model.vision.pixels`).
            grid: Squares of patches of one of them.
            count: Number of images.
        """
        config, device = self.config, pixels_IX.device
        size = pixels_IX.shape[0] // count
        places_I2 = self._places(grid).to(device)
        x_ID = self.patch_embed["proj"](pixels_IX)
        if config.positions:
            x_ID = x_ID + self._positions(places_I2, grid).to(x_ID.dtype).repeat(count, 1)
        places_I2 = places_I2.repeat(count, 1)
        order_I, windows = self._windows(grid)
        if order_I is not None:
            starts = torch.arange(count)[:, None] * size
            order_I = (starts + order_I).flatten().to(device)
            x_ID, places_I2 = x_ID[order_I], places_I2[order_I]
        angles, whole, windows = self._angles(places_I2), (size,) * count, windows * count
        deep = []
        for index, block in enumerate(self.blocks):
            is_whole = not windows or index in config.whole_layers
            x_ID = block(x_ID, angles, whole if is_whole else windows)
            if index in config.deep:
                deep.append(self.deepstack_merger_list[config.deep.index(index)](x_ID))
        tokens_ID = self.merger(x_ID)
        if order_I is not None:  # whole squares were moved: the first patch of each says where it belongs
            first = order_I[:: config.merge**2] // config.merge**2
            tokens_ID = tokens_ID[first.argsort()]
        return Features(tokens_ID, tuple(deep))

    def _places(self, grid: Grid) -> torch.Tensor:
        """Return each patch's row and column, [I, 2], square by square."""
        side = self.config.merge
        row, column = torch.meshgrid(
            torch.arange(grid.rows * side), torch.arange(grid.columns * side), indexing="ij"
        )
        shape = (grid.rows, side, grid.columns, side)
        return torch.stack([x.reshape(shape).transpose(1, 2).flatten() for x in (row, column)], dim=1)

    def _positions(self, places_I2: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the learned positions [I, D], whose square table is stretched over the image."""
        side = math.isqrt(self.config.positions)
        sizes = torch.tensor((grid.rows, grid.columns), device=places_I2.device) * self.config.merge
        at_I2 = places_I2.float() * (side - 1) / (sizes - 1).clamp(min=1)
        low_I2 = at_I2.floor()
        taps_I22 = torch.stack((low_I2, low_I2 + 1), dim=-1).long().clamp(max=side - 1)
        part_I2 = at_I2 - low_I2
        weights_I22 = torch.stack((1 - part_I2, part_I2), dim=-1)
        index = taps_I22[:, 0, :, None] * side + taps_I22[:, 1, None]
        weights = weights_I22[:, 0, :, None] * weights_I22[:, 1, None]
        rows = F.embedding(index.flatten(1), self.pos_embed.weight)
        return (rows * weights.flatten(1)[..., None]).sum(1)

    def _angles(self, places_I2: torch.Tensor) -> Angles:
        """Return cos and sin: a quarter of a head's channels turn by the row, a quarter by the column, and again."""
        dims = self.config.width // self.config.num_heads // 2
        waves = 10000.0 ** (torch.arange(0, dims, 2, device=places_I2.device).float() / dims)
        turns_IC = (places_I2[..., None].float() * (1.0 / waves)).flatten(1)
        turns_I1C = torch.cat((turns_IC, turns_IC), dim=-1)[:, None]
        return Angles(turns_I1C.cos(), turns_I1C.sin())

    def _windows(self, grid: Grid) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """Return an order that brings each window's patches together, and their numbers; (None, ()) for no windows."""
        side, unit = self.config.window, self.config.merge**2
        if not side:
            return None, ()
        row, column = torch.meshgrid(torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
        window = (row // side * -(-grid.columns // side) + column // side).flatten()
        squares = torch.argsort(window, stable=True)
        order = (squares[:, None] * unit + torch.arange(unit)).flatten()
        return order, tuple((torch.bincount(window) * unit).tolist())


# --- CLIP, SigLIP and their projections ---------------------------------------------------------------------------


class ClipAttention(nn.Module):
    """Attention of all patches of a view to all."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q_proj, self.k_proj = Linear(config.width, config.width), Linear(config.width, config.width)
        self.v_proj, self.out_proj = Linear(config.width, config.width), Linear(config.width, config.width)

    def forward(self, x_ID: torch.Tensor, views: int) -> torch.Tensor:
        """Attend within each of so many views."""
        q, k, v = (
            p(x_ID).view(x_ID.shape[0], self.heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(q, k, v, (x_ID.shape[0] // views,) * views))


class ClipMLP(nn.Module):
    """Feed-forward part."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.fc1 = Linear(config.width, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.width)

    def forward(self, x_ID: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        return self.fc2(activate(self.activation, self.fc1(x_ID)))


class ClipLayer(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.width, eps=config.norm_eps)
        self.self_attn = ClipAttention(config)
        self.layer_norm2 = LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = ClipMLP(config)

    def forward(self, x_ID: torch.Tensor, views: int) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x_ID = x_ID + self.self_attn(self.layer_norm1(x_ID), views)
        return x_ID + self.mlp(self.layer_norm2(x_ID))


class ClipEmbeddings(nn.Module):
    """Patches and their positions; before them CLIP's token of the whole image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = Patches(config, has_bias=not config.has_class)
        self.position_embedding = embedding(config.positions, config.width)
        if config.has_class:
            self.class_embedding = nn.Parameter(torch.empty(config.width))

    def forward(self, pixels_IX: torch.Tensor, views: int) -> torch.Tensor:
        """Return the residual stream before the layers, view by view."""
        x_VID = self.patch_embedding(pixels_IX).unflatten(0, (views, -1))
        if hasattr(self, "class_embedding"):
            first = self.class_embedding.expand(views, 1, -1).to(x_VID.dtype)
            x_VID = torch.cat((first, x_VID), dim=1)
        return (x_VID + self.position_embedding.weight).flatten(0, 1)


class ClipBody(nn.Module):
    """The tower without its projection."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = ClipEmbeddings(config)
        if config.has_class:
            self.pre_layrnorm = LayerNorm(config.width, eps=config.norm_eps)
        layers = nn.ModuleList(ClipLayer(config) for _ in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, pixels_IX: torch.Tensor, views: int) -> torch.Tensor:
        """Return features [V, I, D] of each view's patches."""
        x_ID = self.embeddings(pixels_IX, views)
        if self.config.has_class:
            x_ID = self.pre_layrnorm(x_ID)
        layers = list(self.encoder["layers"].children())
        for layer in layers[: self.config.used_layers or len(layers)]:
            x_ID = layer(x_ID, views)
        if not self.config.used_layers:
            x_ID = self.post_layernorm(x_ID)
        x_VID = x_ID.unflatten(0, (views, -1))
        return x_VID[:, 1:] if self.config.has_class else x_VID


class Pooling(nn.Module):
    """Gemma 3: the mean of each square of patches, normalised and projected."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.side = config.merge
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.width, config.out_width))
        self.mm_soft_emb_norm = RMSNorm(config.width, config.norm_eps, 1.0)

    def forward(self, x_VID: torch.Tensor) -> torch.Tensor:
        """Return embeddings [V, tokens, D]."""
        pooled = F.avg_pool2d(_as_square(x_VID).permute(0, 3, 1, 2), self.side).flatten(2).transpose(1, 2)
        # One product per view: a larger one may sum in another order, and the bits of an image would be of its company.
        return torch.stack([view @ self.mm_input_projection_weight for view in self.mm_soft_emb_norm(pooled)])


class TwoProducts(nn.Module):
    """LLaVA: two products with an activation between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation = config.projector_activation
        self.linear_1 = Linear(config.width, config.out_width, bias=config.has_projector_bias)
        self.linear_2 = Linear(config.out_width, config.out_width, bias=config.has_projector_bias)

    def forward(self, x_VID: torch.Tensor) -> torch.Tensor:
        """Return embeddings [V, tokens, D]."""
        rows = activate(self.activation, self.linear_1(x_VID.flatten(0, 1)))
        return self.linear_2(rows).unflatten(0, x_VID.shape[:2])


class Shuffle(nn.Module):
    """Idefics 3 and SmolVLM: the patches of each square one after the other (pixel shuffle), and a product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.side = config.merge
        product = Linear(config.width * config.merge**2, config.out_width, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": product})

    def forward(self, x_VID: torch.Tensor) -> torch.Tensor:
        """Return embeddings [V, tokens, D]."""
        square, side = _as_square(x_VID), self.side
        views, size = square.shape[0], square.shape[1] // side
        cut = square.view(views, size, side, size, side, -1).transpose(2, 3)
        rows = self.modality_projection["proj"](cut.reshape(views * size**2, -1))
        return rows.unflatten(0, (views, -1))


def _as_square(x_VID: torch.Tensor) -> torch.Tensor:
    """Return patches [V, rows, columns, D] of square views."""
    return x_VID.unflatten(1, (math.isqrt(x_VID.shape[1]), -1))


class ClipTower(nn.Module):
    """A tower of CLIP or SigLIP over square views of one size, and a projection of its features.

    Args:
        config: Its shape.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.tower = ClipBody(config)
        kinds = {"pool": Pooling, "mlp": TwoProducts, "shuffle": Shuffle}
        self.projector = kinds[config.projector](config)

    def forward(self, pixels_IX: torch.Tensor, grid: Grid, count: int = 1) -> Features:
        """Encode images.

        Args:
            pixels_IX: Patches of their views, image by image, row by row.
            grid: Placeholder tokens of one of them.
            count: Number of images.
        """
        x_VID = self.tower(pixels_IX, grid.views * count)
        return Features(self.projector(x_VID).flatten(0, 1))


def make_tower(config: VisionConfig) -> nn.Module:
    """Make the module of a tower's configuration, with uninitialised weights; it takes what `QwenTower` takes."""
    return QwenTower(config) if config.tower == "qwen" else ClipTower(config)
