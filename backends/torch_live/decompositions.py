"""How operations are written out for Inductor, where its own way is slow on the GPU."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def group_norm_by_channel(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n: int, c: int, pixels: int, groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aten.native_group_norm`` by way of each channel's mean and variance.

    Channels lie side by side in memory, so the sums over pixels read whole lines, where a sum over one group of
    channels would read a few bytes of each pixel. Groups follow from their channels exactly:
    var(group) = mean(var(channels)) + var(means of the channels), all populations being of one size.

    Returns:
        The result, (n, c, ...) of x's dtype; mean and reciprocal deviation of each group, (n, groups), float32.
    """
    pixelwise = list(range(2, x.ndim))
    variance, mean = torch.var_mean(x.float(), pixelwise, correction=0)  # (n, c)
    spread, middle = torch.var_mean(mean.view(n, groups, -1), -1, correction=0, keepdim=True)  # (n, groups, 1)
    scale = torch.rsqrt(variance.view(n, groups, -1).mean(-1, keepdim=True) + eps + spread)
    per_channel = (n, c, *(1 for _ in pixelwise))
    gain = scale.expand(n, groups, c // groups).reshape(n, c)
    shift = -(middle.expand(n, groups, c // groups).reshape(n, c)) * gain
    if weight is not None:
        gain, shift = gain * weight.float(), shift * weight.float()
    if bias is not None:
        shift = shift + bias.float()
    result = x.float() * gain.view(per_channel) + shift.view(per_channel)
    return result.to(x.dtype), middle.squeeze(-1), scale.squeeze(-1)


TABLE = {aten.native_group_norm.default: group_norm_by_channel}
"""Operation -> how it is written out, where that was measured to be faster."""
