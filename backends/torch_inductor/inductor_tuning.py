"""Operations written out for Inductor where its own way is slow on the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)

MOST_SUMMED = 2048
"""Elements of a group that one program of the GPU sums up."""
BY_LINES = 1024
"""From so many pixels on, an image's lines are summed up, channel by channel."""


def group_norm_in_parts(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n: int, c: int, pixels: int, groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aten.native_group_norm`` by way of the mean and variance of parts of each group, summed up side by side.

    Exact: var(group) = mean(var(part) + (mean(part) - mean(group))^2), all parts being of one size.

    Returns:
        The result, (n, c, height, width) of x's dtype; mean and reciprocal deviation of each group, (n, groups),
        float32.
    """
    # x is no hint at the layout: on a GPU torch hands on a copy in another, which Inductor folds into its readers
    if x.ndim != 4 or (isinstance(pixels, int) and part_of(pixels, c // groups) == pixels):
        return NotImplemented
    image = x.permute(0, 2, 3, 1)
    moments = _moments_by_lines if usual_size(pixels) >= BY_LINES else _moments_by_tiles
    middle, variance = moments(image, groups)
    scale = torch.rsqrt(variance + eps)
    by_channel = [t.repeat_interleave(c // groups, 1).view(n, 1, 1, c) for t in (middle, scale)]
    result = (image.float() - by_channel[0]) * by_channel[1]
    if weight is not None:
        result = result * weight.float()
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).permute(0, 3, 1, 2), middle, scale


def _moments_by_tiles(image: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each group of (n, height, width, c), both (n, groups); a part has some pixels of a group.

    A line of them where sizes are free: nothing else divides all.
    """
    n, height, width, c = image.shape
    pixels = height * width
    rows = part_of(pixels, c // groups) if isinstance(pixels, int) else width
    parts = image.float().reshape(n, height if rows is width else pixels // rows, rows, groups, c // groups)
    variance, mean = torch.var_mean(parts, (2, 4), correction=0, keepdim=True)
    return _moments_of_parts(variance, mean, (1, 2, 4))


def _moments_by_lines(image: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; a part is one channel of a line: many programs read all channels of a pixel as they lie in memory."""
    n, height, width, c = image.shape
    line = image.float()
    if image.dtype in HALVES:
        # loses less than rounding to such numbers did, and needs no second look at the line
        mean = line.sum(2) / width
        variance = ((line * line).sum(2) / width - mean * mean).clamp_min(0)
    else:
        variance, mean = torch.var_mean(line, 2, correction=0)
    variance, mean = (t.view(n, height, groups, c // groups) for t in (variance, mean))
    return _moments_of_parts(variance, mean, (1, 3))


def _moments_of_parts(
    variance: torch.Tensor, mean: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all parts along ``dims``, all of one size; one kernel, since one sum needs the other."""
    middle = mean.mean(dims, keepdim=True)
    return middle.flatten(1), (variance + (mean - middle).square()).mean(dims)


def usual_size(size: int | torch.SymInt) -> int:
    """Return a size, or for a free one the size that its kind is compiled for; nothing is taken for granted by it."""
    return size if isinstance(size, int) else size.node.hint


def part_of(pixels: int, wide: int) -> int:
    """The most pixels of ``wide`` channels that one program sums up; they divide all pixels evenly."""
    return max((rows for rows in range(1, pixels + 1) if pixels % rows == 0 and rows * wide <= MOST_SUMMED), default=1)


LOG2_OF_TAIL = (
    -1.1511284112930298, -0.45902469754219055, -0.05298500135540962, 0.007677667774260044,
    -0.0005477062659338117, -3.605544043239206e-05, 1.1132272447866853e-05, -6.99731742770382e-07,
)  # fmt: skip
"""Polynomial of a, lowest power first, for log2(erfc(a / sqrt(2))) / a at a >= 0: a least-squares fit up to 5, weighed
until GELU's error was even. Its last power is odd and below zero, so beyond 5 the tail goes to zero as it should."""


def gelu_by_a_power(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """``aten.gelu`` of half precision with half the instructions of an error function, which bound these kernels.

    gelu(x) = x Phi(x) = max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2. The error is at most 2.4e-7, and 5e-6 of what is
    larger than 6e-5: less than that of torch's own formula in float32, which loses digits below zero.
    """
    if approximate != "none" or x.dtype not in HALVES:
        return NotImplemented
    value = x.float()
    size = value.abs()
    power = size * LOG2_OF_TAIL[-1] + LOG2_OF_TAIL[-2]
    for factor in reversed(LOG2_OF_TAIL[:-2]):
        power = power * size + factor
    half = size * 0.5
    return (value * 0.5 + half - half * torch.exp2(power * size)).to(x.dtype)


LOG2_OF_E = 1.4426950408889634


def silu_by_a_root(x: torch.Tensor) -> torch.Tensor:
    """``aten.silu`` of half precision without a division: x / (1 + exp(-x)) = x rsqrt(1 + 2^(-x log2(e)))^2."""
    if x.dtype not in HALVES:
        return NotImplemented
    value = x.float()
    root = torch.rsqrt(1 + torch.exp2(value * -LOG2_OF_E))
    return (value * root * root).to(x.dtype)


def bias_after_product(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``aten.addmm`` of half precision as a product and a sum, which Inductor joins with what comes next.

    cuBLAS takes up to half as long again for a product that adds a bias itself. Rounded as often: the sum is made in
    float32, together with what is added to it.
    """
    if (beta, alpha) != (1, 1) or a.dtype not in HALVES:
        return NotImplemented
    return (torch.mm(a, b).float() + bias.float()).to(a.dtype)


FEW_PIXELS = 256
"""Up to so many of all results together a convolution keeps only some of a GPU's processors busy; a product of the
same numbers is shared among all. Where sizes are free, those count that a kind is compiled for."""


def convolution_as_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    """``aten.convolution`` of half precision as one product: what each result sees is laid out in a row.

    Rows are in the order in which kernels lie in channels-last memory, so that these are a matrix as they are. That is
    for few pixels, and for kernels of one pixel where sizes are free: a profile showed a copy of their input there.
    """
    plain = x.ndim == 4 and not transposed and groups == 1 and list(dilation) == [1, 1]
    if not plain or x.dtype not in HALVES:
        return NotImplemented
    n, _, height, width = x.shape
    if weight.shape[2:].numel() == 1:
        if isinstance(n * height * width, int) or list(stride) != [1, 1] or list(padding) != [0, 0]:
            return NotImplemented
        result = torch.mm(x.permute(0, 2, 3, 1).reshape(-1, weight.shape[1]), weight.flatten(1).t())
        return _image(result, bias, n, height, width)
    above, left = padding
    down, across = weight.shape[2:]
    lines = (height + 2 * above - down) // stride[0] + 1
    columns = (width + 2 * left - across) // stride[1] + 1
    if usual_size(n * lines * columns) > FEW_PIXELS:
        return NotImplemented
    image = torch.nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, above, above))
    seen = image.unfold(1, down, stride[0]).unfold(2, across, stride[1])  # (n, lines, columns, channels, down, across)
    rows = seen.permute(0, 1, 2, 4, 5, 3).reshape(n * lines * columns, -1)
    return _image(torch.mm(rows, weight.permute(2, 3, 1, 0).reshape(rows.shape[1], -1)), bias, n, lines, columns)


def _image(rows: torch.Tensor, bias: torch.Tensor | None, n: int, height: int, width: int) -> torch.Tensor:
    """A row for each pixel, with a bias added, as images in channels-last memory."""
    if bias is not None:
        rows = (rows.float() + bias.float()).to(rows.dtype)
    return rows.view(n, height, width, -1).permute(0, 3, 1, 2)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: group_norm_in_parts,
    aten.gelu.default: gelu_by_a_power,
    aten.silu.default: silu_by_a_root,
    aten.addmm.default: bias_after_product,
    aten.convolution.default: convolution_as_product,
}
"""Operation -> how it is written out; ``NotImplemented`` leaves it to Inductor."""


def change_layouts(graph: torch.fx.GraphModule) -> None:
    """Have some results in memory, and in another order there, than Inductor would choose."""
    try:
        from torch._inductor.inductor_prims import force_stride_order
    except ImportError as error:
        log.warning("Hybrid TRT: this torch has no setting for layouts in memory (%s): networks run slower", error)
        return
    _keep_channels_last(graph, force_stride_order)
    _keep_indices(graph, force_stride_order)
    graph.recompile()


def _keep_indices(graph: torch.fx.GraphModule, laid_out: Callable[..., Any]) -> None:
    """Have places in memory from each of which a whole row is copied, and not compute them for each element of the row.

    Where sizes are free that takes several divisions: on an H200 such kernels took two fifths of LTX-2's decoding.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        given, places = node.args
        if len(places) < given.meta["val"].ndim:
            for place in filter(None, places):
                _lay_out(graph, place, tuple(range(place.meta["val"].ndim, 0, -1)), laid_out)


def _lay_out(graph: torch.fx.GraphModule, node: torch.fx.Node, strides: Sequence[int], laid_out: Callable[..., Any]
             ) -> None:  # fmt: skip
    """Have a node's result in memory, in the order of some strides, for all who read it."""
    with graph.graph.inserting_after(node):
        made = graph.graph.call_function(laid_out, (node, strides))
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _keep_channels_last(graph: torch.fx.GraphModule, laid_out: Callable[..., Any]) -> None:
    """Let what is put together from several images' channels lie in memory as convolutions read it, on a GPU.

    Where a norm and a convolution read it, Inductor lays it out for the norm's copy, channel by channel, and each
    kernel that reads or writes it then jumps through memory. Tokens that attention reads are no channels.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        value = node.meta["val"]
        if value.device.type == "cuda" and _is_of_channels(node):
            strides = torch.empty(value.shape, device="meta").to(memory_format=torch.channels_last).stride()
            _lay_out(graph, node, strides, laid_out)


def _is_of_channels(cat: torch.fx.Node) -> bool:
    """Tell whether images' channels are put together; tokens of heads are too, and their count may be free."""
    value = cat.meta["val"]
    if value.ndim != 4 or list(cat.args[1:]) != [1] or not isinstance(value.shape[1], int):
        return False
    return any(user.target is not aten.transpose.int for user in cat.users)
