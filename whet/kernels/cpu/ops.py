"""The C++ kernels as functions of tensors, and their gradients.

Every function gives a row the same bits whatever other rows are in the call and however many threads run, so that a
sampler and a trainer that both call them agree exactly. `whet.kernels.dispatch` says which tensors they accept, and
runs the eager twins on all others. Weights are packed into panels once (`panels`), and again when they change.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_double, c_float, c_int, c_long, c_void_p
from typing import Any

import torch
import torch.nn.functional as F

from whet.kernels.cpu import build
from whet.kernels.eager import Adapted, product_dtype

QUANTUM = 16
ENOUGH = 8192
"""Minimum of numbers per thread: waking a thread costs more than a little work."""
SMALL, MANY_ROWS = 1024, 256
"""Up to this width, and from this many rows on, packing a weight for its input's gradient pays off (float32)."""
WIDENED, ALIGNED = 2**22, 64
"""Most numbers that `matmul` widens at a time, and what its blocks' sides are a multiple of."""
CHANNELS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16)


class Term(ctypes.Structure):
    """A product of float32 rows and panels that is added to another one."""

    _fields_ = (("rows", c_void_p), ("packed", c_void_p), ("stride", c_long), ("width", c_long))


class Weight(ctypes.Structure):
    """A packed weight, the destination of its product, and what is added to that."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("columns", c_long),
        ("stride", c_long),
        ("terms", c_void_p),
        ("count", c_long),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "attend": (c_int, *[c_void_p] * 5, *[c_long] * 3, c_void_p, c_long, c_int),
    "attend_back": (c_int, *[c_void_p] * 9, *[c_long] * 3, c_void_p, c_long, c_int),
    "write_cache": (c_int, *[c_void_p] * 6, *[c_long] * 4, c_int),
    "decode": (c_int, *[c_void_p] * 4, *[c_long] * 4, c_int),
    "pack": (c_int, c_int, c_void_p, c_void_p, c_long, c_long, c_int),
    "packed_size": (c_int, c_long, c_long),
    "linear": (c_int, c_int, c_void_p, c_long, c_long, POINTER(Weight), c_int, c_int),
    "narrow": (c_int, c_void_p, c_long, c_long, POINTER(Weight), c_int, c_int),
    "norm": (c_int, *[c_void_p] * 4, c_long, c_long, c_float, c_int),
    "norm_back": (c_int, *[c_void_p] * 6, c_long, c_long, c_int),
    "rotate": (c_int, *[c_void_p] * 4, *[c_long] * 3, c_float, c_int),
    "gate": (c_int, *[c_void_p] * 3, c_long, c_long, c_int),
    "gate_back": (c_int, *[c_void_p] * 5, c_long, c_long, c_int),
    "score": (*[c_void_p] * 5, *[c_long] * 3, c_float, c_int),
    "score_back": (c_int, *[c_void_p] * 7, *[c_long] * 3, c_float, c_int, c_int),
    "draw": (*[c_void_p] * 2, *[c_long] * 3, c_float, c_int),
    "squares": (c_int, c_void_p, c_long, c_int),
    "adamw": (c_int, *[c_void_p] * 4, c_long, c_void_p, c_int),
    "layers": (c_int, c_int, c_void_p, c_long, *[c_void_p] * 8),
    "layers_memory": (c_void_p,),
}
PANELS = "_whet_panels"
RESULTS = {"packed_size": c_long, "layers_memory": c_long, "squares": c_double}


def _functions() -> dict[str, Any]:
    loaded = build.library()
    found: dict[str, Any] = {}
    for name, arguments in SIGNATURES.items() if loaded is not None else ():
        function = getattr(loaded, f"whet_{name}")
        function.argtypes = arguments
        function.restype = RESULTS.get(name)
        found[name] = function
    return found


_table: dict[str, Any] | None = None


def call(name: str, *arguments: Any) -> Any:
    """Call an entry point of the library; tensors are passed as their addresses, None as a null pointer."""
    global _table
    if _table is None:
        _table = _functions()
    plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        # A profiler only sees PyTorch's operators.
        with torch.profiler.record_function(f"whet::{name}"):
            return _table[name](*plain)
    return _table[name](*plain)


def _wide(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.float32)


def _wide_dtype(dtype: torch.dtype) -> int:
    return int(dtype == torch.float32)


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right by PyTorch; bfloat16 goes through float32 on a CPU without bfloat16 products.

    Float32 copies and results then exist block by block: of a whole head they took 300 MB (124M parameters). A number
    is the same sum over the whole inner axis either way; MKL's bits do not depend on the blocks.
    """
    wide = product_dtype(right)
    if wide == right.dtype:
        return left @ right
    (rows, inner), columns = left.shape, right.shape[1]
    out = torch.empty(rows, columns, dtype=right.dtype)
    num_columns = min(columns, max(ALIGNED, WIDENED // inner // ALIGNED * ALIGNED))
    widest = num_columns if left.dtype == wide else max(inner, num_columns)
    num_rows = max(ALIGNED, WIDENED // widest // ALIGNED * ALIGNED)
    for first in range(0, columns, num_columns):
        part = right[:, first : first + num_columns].to(wide)
        for start in range(0, rows, num_rows):
            block = left[start : start + num_rows].to(wide) @ part
            out[start : start + num_rows, first : first + num_columns] = block
    return out


def _threads(work: int = sys.maxsize) -> int:
    """Return the number of threads for this many numbers."""
    return max(1, min(torch.get_num_threads(), work // ENOUGH))


def panels(weight_FD: torch.Tensor, dtype: torch.dtype, *, transposed: bool = False) -> torch.Tensor:
    """Return a weight packed for `linear`; packed again only if the weight has changed.

    Args:
        weight_FD: Weight [F, D], or [D, F] if `transposed`.
        dtype: Dtype of the product.
        transposed: Whether the weight is stored as GPT-2 stores it.
    """
    # The cache is an attribute of the weight, so that it dies with it. Address and version counter show a change;
    # whoever writes past PyTorch (the AdamW kernel) must increment the version.
    kept: dict[torch.dtype, tuple[Any, torch.Tensor]] = getattr(weight_FD, PANELS, None) or {}
    setattr(weight_FD, PANELS, kept)
    key = weight_FD.data_ptr(), weight_FD._version
    stale_key, stale = kept.get(dtype, (None, None))
    if stale is not None and stale_key == key:
        return stale

    # The stale panels' memory is reused: a training step repacks every weight.
    source = weight_FD.detach()
    packed = _pack(source.t() if transposed else source, dtype, stale)
    kept[dtype] = key, packed
    return packed


def _pack(weight_FD: torch.Tensor, dtype: torch.dtype, packed: torch.Tensor | None = None) -> torch.Tensor:
    source = weight_FD.contiguous()  # a transposed weight is copied once here, not at each product
    if source.shape[1] % QUANTUM:  # of an adapter's rank: zeros add nothing
        source = F.pad(source, (0, -source.shape[1] % QUANTUM))
    rows, width = source.shape
    if packed is None:
        packed = torch.empty(call("packed_size", _wide_dtype(dtype), rows, width), dtype=dtype)
    call("pack", _wide(source), _wide_dtype(dtype), source, packed, rows, width, _threads())
    return packed


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of the weights' packed copies."""
    for tensor in tensors:
        if hasattr(tensor, PANELS):
            delattr(tensor, PANELS)


def product(
    x_ND: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by a packed weight.

    Args:
        x_ND: Contiguous rows in the dtype of the panels, a multiple of `QUANTUM` wide, as panels are.
        packed: Panels.
        columns: Rows of the weight, F.
        bias: Bias [F] in the same dtype.
        out: Output [N, at least F] in the same dtype or float32; allocated if None.
    """
    rows, width = x_ND.shape
    assert width % QUANTUM == 0, f"panels are padded to whole vectors, rows of {width} are not"
    if out is None:
        out = torch.empty(rows, columns, dtype=x_ND.dtype)
    weight = _weight(packed, columns, out, bias)
    wide, out_wide = _wide(x_ND), _wide(out)
    call("linear", wide, out_wide, x_ND, rows, width, ctypes.byref(weight), 1, _threads())
    return out


def _weight(
    packed: torch.Tensor, columns: int, out: torch.Tensor, bias: torch.Tensor | None = None, terms: Any = ()
) -> Weight:
    """Return what the kernels read of a product; the caller keeps the tensors and `terms` (an array) alive."""
    where = ctypes.addressof(terms) if len(terms) else None
    own = None if bias is None else bias.data_ptr()
    return Weight(packed.data_ptr(), own, out.data_ptr(), columns, out.stride(0), where, len(terms))


def _term(rows_NK: torch.Tensor, packed: torch.Tensor) -> Term:
    assert rows_NK.dtype == torch.float32
    assert rows_NK.shape[1] % QUANTUM == 0
    return Term(rows_NK.data_ptr(), packed.data_ptr(), rows_NK.stride(0), rows_NK.shape[1])


class Tape:
    """Recorded results of a forward pass, for one that is only differentiated.

    While one is open (`replaying`), norms, products, rotations, attention and gates take the next result instead of
    computing it; their backward passes are unchanged.

    Args:
        results: In the order of the calls: each call's result, and what else its backward pass needs; None for a result
            that nothing reads.
    """

    def __init__(self, results: Iterable[tuple[torch.Tensor | None, ...]]) -> None:
        self._results = iter(results)

    def next(self) -> tuple[torch.Tensor | None, ...]:
        """Return the next result."""
        return next(self._results)

    @property
    def is_over(self) -> bool:
        """Whether all results were taken."""
        return next(self._results, None) is None


_tape: Tape | None = None


@contextmanager
def replaying(tape: Tape | None) -> Iterator[None]:
    """Take results from a tape within this context; None computes them."""
    global _tape
    before, _tape = _tape, tape
    try:
        yield
        assert tape is None or tape.is_over, "the forward pass made fewer calls than the tape has"
    finally:
        _tape = before


def recorded() -> tuple[torch.Tensor | None, ...] | None:
    """Return the next result of the open tape; None without one."""
    return None if _tape is None else _tape.next()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        transposed: bool,
    ) -> torch.Tensor:
        x = x_ND.to(dtype).contiguous()
        # A frozen weight has no gradient, which alone would read the input.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.rows = x.shape[0]
        ctx.facts = x_ND.dtype, bias is not None, transposed
        columns = weight.shape[1] if transposed else weight.shape[0]
        if (found := recorded()) is not None:
            if found[0] is not None:
                return found[0]
            # Nothing reads this result: one element, expanded, has the right shape without memory.
            return torch.empty(1, 1, dtype=dtype).expand(x.shape[0], columns)
        packed = panels(weight, dtype, transposed=transposed)
        return product(x, packed, columns, bias=None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype, has_bias, transposed = ctx.facts
        grad = upstream[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        # Gradients need not be row-invariant, so PyTorch computes them, except where packing once more is faster.
        is_small = max(weight.shape) <= SMALL and ctx.rows >= MANY_ROWS
        is_small = is_small and grad.dtype == dtype == weight.dtype == torch.float32
        if needs_x:
            cast = weight.to(grad.dtype).t() if transposed else weight.to(grad.dtype)
            if is_small and cast.shape[0] % QUANTUM == 0:
                grad_x = product(grad.contiguous(), _pack(cast.detach().t(), dtype), cast.shape[1])
            else:
                grad_x = matmul(grad, cast).to(dtype)
        if needs_weight:
            grad_weight = (matmul(x.t(), grad) if transposed else matmul(grad.t(), x)).to(weight.dtype)
        if has_bias and needs_bias:
            grad_bias = grad.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool = False
) -> torch.Tensor:
    """Return x @ weight.T + bias, in autocast's dtype if that is on; see `whet.kernels.eager.linear`."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    needs_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    # A tape has a result of every product, of the first frozen ones, too, which nothing differentiates.
    if (needs_grad and torch.is_grad_enabled()) or _tape is not None:
        return _Linear.apply(x, weight, bias, dtype, transposed)  # pyright: ignore[reportReturnType]
    # Skip autograd: its bookkeeping takes as long as a small product.
    packed = panels(weight, dtype, transposed=transposed)
    columns = weight.shape[1] if transposed else weight.shape[0]
    rounded = None if bias is None else bias.to(dtype)
    return product(x.to(dtype).contiguous(), packed, columns, bias=rounded)


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        y_NF: torch.Tensor,
        a_RD: torch.Tensor,
        b_FR: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        if (found := recorded()) is None:
            inner, out = _low_rank(x_ND, y_NF, a_RD, b_FR, scaling)
        else:  # only the sum is kept: the narrow product is computed again
            inner = _narrow(x_ND, a_RD, scaling)
            nothing = torch.empty(1, 1, dtype=y_NF.dtype).expand(x_ND.shape[0], b_FR.shape[0])
            out = nothing if found[0] is None else found[0]
        ctx.save_for_backward(x_ND, inner, a_RD, b_FR)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        needs_x, needs_y, needs_a, needs_b = ctx.needs_input_grad[:4]
        grad = upstream[0].float()
        grad_x = grad_a = grad_b = None
        if needs_b:
            grad_b = grad.t() @ inner[:, : a.shape[0]]
        if needs_x or needs_a:
            grad_inner = (grad @ b).mul_(ctx.scaling)
            grad_a = grad_inner.t() @ x.float() if needs_a else None
            grad_x = (grad_inner @ a).to(x.dtype) if needs_x else None
        return grad_x, upstream[0] if needs_y else None, grad_a, grad_b, None


def _low_rank(
    x_ND: torch.Tensor, y_NF: torch.Tensor, a_RD: torch.Tensor, b_FR: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled product with A, and the sum."""
    inner = _narrow(x_ND, a_RD, scaling)
    change = product(inner, panels(b_FR, torch.float32), b_FR.shape[0])
    return inner, change.add_(y_NF).to(y_NF.dtype)


def _narrow(x_ND: torch.Tensor, a_RD: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scaling x A^T, its columns padded to whole vectors."""
    rank, wide = a_RD.shape[0], torch.float32
    inner = torch.empty(x_ND.shape[0], rank + -rank % QUANTUM)
    inner[:, rank:] = 0.0
    product(x_ND.to(wide).contiguous(), panels(a_RD, wide), rank, out=inner)
    return inner.mul_(scaling)


def low_rank(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return y + scaling x A^T B^T, whatever the rank; see `whet.kernels.eager.low_rank`."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, y, a, b))
    if needs_grad or _tape is not None:
        return _LowRank.apply(x, y, a, b, scaling)  # pyright: ignore[reportReturnType]
    return _low_rank(x, y, a, b, scaling)[1]


class _Products(torch.autograd.Function):
    """Products of the same rows with several frozen weights, each with an adapter beside it.

    As `_Linear` and `_LowRank` one after the other, with the same bits; but the rows are read once for all As, what an
    adapter adds is added while the product is in cache, and so are the parts of the input's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, parts: Sequence[Adapted], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = x_ND.contiguous()
        inner = _inner(x, parts)
        # A tape has the product alone, which nothing reads, and then the sum.
        found = [(recorded(), recorded())[1] for _ in parts] if _tape is not None else []
        ctx.save_for_backward(x, inner)
        ctx.parts = parts
        if not found:
            return tuple(_added(x, inner, parts))
        nothing = torch.empty(1, 1, dtype=x.dtype)
        return tuple(
            nothing.expand(x.shape[0], part.weight.shape[0]) if own is None or own[0] is None else own[0]
            for part, own in zip(parts, found, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        parts: Sequence[Adapted] = ctx.parts
        num_rows, width = x.shape
        # Gradients need not be row-invariant; in 16 bits PyTorch computes those with the weights.
        grads = [grad.contiguous() for grad in upstream]
        wide = [grad.float() for grad in grads]
        spans = _spans(parts)
        total = spans[-1].stop

        grad_inner, a_XD = torch.zeros(num_rows, total), torch.zeros(total, width)
        for part, grad, span in zip(parts, wide, spans, strict=True):
            own, rank = grad_inner[:, span], part.a.shape[0]
            if grad.shape[1] % QUANTUM:
                own[:, :rank] = grad @ part.b
            else:
                product(grad, _pack(part.b.detach().t(), torch.float32), rank, out=own)
            own.mul_(part.scaling)
            a_XD[span][:rank] = part.a
        grad_a_XD = grad_inner.t() @ x.float()
        found: list[torch.Tensor | None] = []
        for part, grad, span in zip(parts, wide, spans, strict=True):
            rank = part.a.shape[0]
            found += [grad_a_XD[span][:rank], grad.t() @ inner[:, span][:, :rank]]
        if not ctx.needs_input_grad[0]:
            return None, None, *found

        packs = x.dtype == torch.float32 and all(grad.shape[1] % QUANTUM == 0 for grad in grads)
        if packs:
            panels_of = [_back_panels(part.weight) for part in parts]
            terms = [_term(grad, own) for grad, own in zip(wide[1:], panels_of[1:], strict=True)]
            narrow = _pack(a_XD.t(), torch.float32)
            terms = (Term * len(parts))(*terms, _term(grad_inner, narrow))
            grad_x = torch.empty(num_rows, width)
            weight = _weight(panels_of[0], width, grad_x, terms=terms)
            first = wide[0]
            call("linear", 1, 1, first, num_rows, first.shape[1], ctypes.byref(weight), 1, _threads())
        else:
            sums = grad_inner @ a_XD
            for part, grad in zip(parts, grads, strict=True):
                sums += matmul(grad, part.weight)
            grad_x = sums.to(x.dtype)
        return grad_x, None, *found


def _spans(parts: Sequence[Adapted]) -> list[slice]:
    """Return the columns of each adapter's narrow product, padded to whole vectors, in that of all."""
    ends = list(itertools.accumulate(part.a.shape[0] + -part.a.shape[0] % QUANTUM for part in parts))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _inner(x_ND: torch.Tensor, parts: Sequence[Adapted]) -> torch.Tensor:
    """Return scaling x A^T of each adapter, side by side."""
    spans = _spans(parts)
    out = torch.zeros(x_ND.shape[0], spans[-1].stop)
    packed = [panels(part.a, torch.float32) for part in parts]
    weights = [
        _weight(own, part.a.shape[0], out[:, span])
        for own, part, span in zip(packed, parts, spans, strict=True)
    ]
    rows, width = x_ND.shape
    array = (Weight * len(weights))(*weights)
    call("narrow", _wide(x_ND), x_ND, rows, width, array, len(weights), _threads())
    for part, span in zip(parts, spans, strict=True):
        out[:, span].mul_(part.scaling)
    return out


def _added(x_ND: torch.Tensor, inner_NX: torch.Tensor, parts: Sequence[Adapted]) -> list[torch.Tensor]:
    """Return the products with the weights, plus those of `inner_NX` with the Bs."""
    rows, width = x_ND.shape
    outs, weights, kept = [], [], []
    for part, span in zip(parts, _spans(parts), strict=True):
        packed, b = panels(part.weight, x_ND.dtype), panels(part.b, torch.float32)
        outs.append(torch.empty(rows, part.weight.shape[0], dtype=x_ND.dtype))
        terms = (Term * 1)(_term(inner_NX[:, span], b))
        weights.append(_weight(packed, part.weight.shape[0], outs[-1], part.bias, terms))
        kept.append((packed, b, terms))
    array = (Weight * len(weights))(*weights)
    wide = _wide(x_ND)
    call("linear", wide, wide, x_ND, rows, width, array, len(weights), _threads())
    return outs


def _back_panels(weight_FD: torch.Tensor) -> torch.Tensor:
    """Return the transposed weight packed, for the gradient of the input."""
    return _pack(weight_FD.detach().t(), torch.float32)


def products(x: torch.Tensor, parts: Sequence[Adapted]) -> list[torch.Tensor]:
    """Return x W^T + bias + scaling x A^T B^T of several frozen weights; see `whet.kernels.eager.products`."""
    trained = [tensor for part in parts for tensor in (part.a, part.b)]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *trained))
    if needs_grad or _tape is not None:
        return list(_Products.apply(x, parts, *trained))  # pyright: ignore[reportArgumentType]
    x = x.contiguous()
    return _added(x, _inner(x, parts), parts)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        # A tape has the sampler's own results, with the bits that would be computed here.
        if (found := recorded()) is not None:
            out, rstd = found
            assert out is not None
            ctx.save_for_backward(x, weight, rstd)
            return out
        out, rstd = torch.empty_like(x), torch.empty(rows)
        call("norm", _wide(x), x, weight, out, rstd, rows, width, eps, _threads(x.numel()))
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad, width = upstream[0].contiguous(), x.shape[-1]
        grad_x, grad_weight = torch.empty_like(x), torch.empty(width)
        rows = x.numel() // width
        call(
            "norm_back",
            _wide(x),
            x,
            weight,
            rstd,
            grad,
            grad_x,
            grad_weight,
            rows,
            width,
            _threads(x.numel()),
        )
        return grad_x, grad_weight.to(weight.dtype), None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, normalise by the root mean square and scale; see `whet.kernels.eager.rms_norm`."""
    total = x if residual is None else x + residual
    return _Norm.apply(total, weight, eps), total  # pyright: ignore[reportReturnType]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        if (found := recorded()) is not None and found[0] is not None:
            return found[0].view(x_NHC.shape)
        return _rotated(x_NHC, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(upstream[0], cos, sin, -1.0), None, None


def _rotated(x_NHC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    x = x_NHC.contiguous()
    out = torch.empty_like(x)
    call("rotate", _wide(x), x, out, cos, sin, *x.shape, sign, _threads(x.numel()))
    return out


def rotate(x_NHC: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to heads; see `whet.kernels.eager.rotate`."""
    cos, sin = cos_N1C.contiguous(), sin_N1C.contiguous()
    return _Rotate.apply(x_NHC, cos, sin)  # pyright: ignore[reportReturnType]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        if (found := recorded()) is not None and found[0] is not None:
            return found[0]
        out = torch.empty_like(gate)
        call("gate", _wide(gate), gate, up, out, *gate.shape, _threads(gate.numel()))
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        grad = upstream[0].contiguous()
        call(
            "gate_back", _wide(gate), gate, up, grad, grad_gate, grad_up, *gate.shape, _threads(gate.numel())
        )
        return grad_gate, grad_up


def swiglu(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; see `whet.kernels.eager.swiglu`."""
    return _Gate.apply(gate_NF, up_NF)  # pyright: ignore[reportReturnType]


class _Adam(ctypes.Structure):
    _fields_ = tuple(
        (name, c_float)
        for name in ("factor", "lr", "beta1", "beta2", "eps", "decay", "correction1", "correction2")
    )


def sum_of_squares(x: torch.Tensor) -> float:
    """Return the sum of squares of a contiguous float32 or bfloat16 tensor, with float64 sums beyond blocks of
    4,096."""
    return call("squares", _wide(x), x, x.numel(), _threads(x.numel()))


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    step: float,
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Update in place by AdamW (1711.05101), reading each number once.

    Args:
        master: Float32 weights.
        grad: Gradient, float32 or bfloat16, contiguous.
        first: First moment, float32.
        second: Second moment, float32.
        step: Updates including this one.
        factor: Factor of the gradient (clipping).
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        decay: Decoupled weight decay.
    """
    facts = _Adam(factor, lr, beta1, beta2, eps, decay, 1 - beta1**step, 1 - beta2**step)
    where = ctypes.byref(facts)
    count = master.numel()
    call("adamw", _wide(grad), master, grad, first, second, count, where, _threads(count))
