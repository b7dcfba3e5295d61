"""A picture of a mask: how much of each cell of the query x key plane is attended, in O(rows + cells) memory.

Shape legend: B mask batch, H mask head, R intervals of a row, Q query rows, K keys, I rows and J columns of cells.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.mask_plan import MaskPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 512  # cells of an axis
_MOST_DENSE_PAIRS = 1 << 26  # a mask with bit tiles is written out up to here

FULL, PARTIAL_FAINT, PARTIAL_DENSE, EMPTY = "#1f3b63", "#fde9c4", "#d9822b", "#f6f7f9"
FRAME = "#c8ccd2"


def cell_area(plan: MaskPlan, q_cell: int, kv_cell: int, batch: int = 0, head: int = 0) -> Tensor:
    """Attended pairs of each cell of ``q_cell`` rows x ``kv_cell`` keys, int64 ``[I, J]``.

    Raises:
        ValueError: a cell is below 1, or not a multiple of the bit tiles' sizes in a mask too large to write out.
    """
    if q_cell < 1 or kv_cell < 1:
        raise ValueError(f"cell: {q_cell} x {kv_cell} given, at least 1 x 1 is needed")
    area_IJ = _interval_area(plan.starts[batch, head], plan.ends[batch, head], plan.kv_len, q_cell, kv_cell)
    if plan.bit_tiles is None:
        return area_IJ
    bits = plan.bit_tiles
    if q_cell % bits.q_tile == 0 and kv_cell % bits.kv_tile == 0:
        first = (batch * bits.row_ptr.shape[1] + head) * bits.row_tiles
        row_N = bits.tile_rows() - first
        here_N = (row_N >= 0) & (row_N < bits.row_tiles)
        where = (row_N[here_N] // (q_cell // bits.q_tile), bits.cols[here_N].long() // (kv_cell // bits.kv_tile))
        return area_IJ.index_put_(where, bits.tile_area(plan.q_len, plan.kv_len)[here_N], accumulate=True)
    if plan.q_len * plan.kv_len > _MOST_DENSE_PAIRS:
        raise ValueError(
            f"cell: {q_cell} x {kv_cell} given, multiples of {bits.q_tile} x {bits.kv_tile} are needed for a mask of "
            f"{plan.q_len} x {plan.kv_len} with bit tiles"
        )
    dense_QK = plan.bit_tiles.to_dense(plan.q_len, plan.kv_len)[batch, head].to(torch.int32)
    area_QJ = area_IJ.new_zeros(plan.q_len, area_IJ.shape[1])
    area_QJ.index_add_(1, torch.arange(plan.kv_len, device=plan.device) // kv_cell, dense_QK.long())
    return area_IJ.index_add_(0, torch.arange(plan.q_len, device=plan.device) // q_cell, area_QJ)


def _interval_area(starts_RQ: Tensor, ends_RQ: Tensor, kv_len: int, q_cell: int, kv_cell: int) -> Tensor:
    """An interval covers its first and last cell in part and those between wholly: two points and a step function."""
    slots, q_len = starts_RQ.shape
    rows, columns = -(-q_len // q_cell), -(-kv_len // kv_cell)
    row_RQ = (torch.arange(q_len, device=starts_RQ.device) // q_cell).expand(slots, q_len)
    used = ends_RQ > starts_RQ
    row, start, end = row_RQ[used], starts_RQ[used].long(), ends_RQ[used].long()
    first, last = start // kv_cell, (end - 1) // kv_cell
    single = first == last

    area_IJ = torch.zeros(rows, columns, dtype=torch.int64, device=starts_RQ.device)
    area_IJ.index_put_((row, first), torch.where(single, end, (first + 1) * kv_cell) - start, accumulate=True)
    row, first, last, end = (x[~single] for x in (row, first, last, end))
    area_IJ.index_put_((row, last), end - last * kv_cell, accumulate=True)
    step_IJ = torch.zeros_like(area_IJ)
    step_IJ.index_put_((row, first + 1), torch.full_like(row, kv_cell), accumulate=True)
    step_IJ.index_put_((row, last), torch.full_like(row, -kv_cell), accumulate=True)
    return area_IJ + step_IJ.cumsum(1)


def cell_size(length: int, tile: int, divisible: bool = True) -> int:
    """Rows or keys of a picture's cell: a part of a tile while the picture stays small, else a multiple of it."""
    cell = tile
    while divisible and cell % 2 == 0 and 2 * -(-length // cell) <= MOST_CELLS:
        cell //= 2
    while -(-length // cell) > MOST_CELLS:
        cell *= 2
    return cell


def picture(plan: MaskPlan, q_tile: int, kv_tile: int, batch: int, head: int) -> tuple[Tensor, Tensor]:
    """(share, tile share) of each cell, float ``[I, J]``: attended in the cell itself, and in the tile it lies in.

    A tile share of 0 means an empty tile and of 1 a full one.  Cells larger than a tile have their own share twice.
    """
    if (bits := _undivided_bit_tiles(plan)) is None:
        q_cell, kv_cell = cell_size(plan.q_len, q_tile), cell_size(plan.kv_len, kv_tile)
    else:
        q_cell = cell_size(plan.q_len, math.lcm(q_tile, bits.q_tile), divisible=False)
        kv_cell = cell_size(plan.kv_len, math.lcm(kv_tile, bits.kv_tile), divisible=False)
    share_IJ = _share(plan, q_cell, kv_cell, batch, head)
    q_group, kv_group = max(q_tile, q_cell), max(kv_tile, kv_cell)
    tile_share = _share(plan, q_group, kv_group, batch, head)
    row_I = torch.arange(share_IJ.shape[0]) * q_cell // q_group
    column_J = torch.arange(share_IJ.shape[1]) * kv_cell // kv_group
    return share_IJ, tile_share[row_I][:, column_J]


def _undivided_bit_tiles(plan: MaskPlan) -> BitTiles | None:
    """The bit tiles, where the mask is too large to write out, so that a cell cannot be a part of one."""
    return plan.bit_tiles if plan.q_len * plan.kv_len > _MOST_DENSE_PAIRS else None


def _share(plan: MaskPlan, q_cell: int, kv_cell: int, batch: int, head: int) -> Tensor:
    area_IJ = cell_area(plan, q_cell, kv_cell, batch, head).cpu()
    rows_I = (plan.q_len - torch.arange(area_IJ.shape[0]) * q_cell).clamp(max=q_cell)
    keys_J = (plan.kv_len - torch.arange(area_IJ.shape[1]) * kv_cell).clamp(max=kv_cell)
    return area_IJ.double() / (rows_I[:, None] * keys_J)


def colours(share_IJ: Tensor, tile_share_IJ: Tensor) -> Tensor:
    """RGB ``[I, J, 3]``: empty tiles pale, full tiles dark, partial ones between two warm tones by the cell's share."""
    full, faint, dense, empty = (
        torch.tensor([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)], dtype=torch.float64)
        for code in (FULL, PARTIAL_FAINT, PARTIAL_DENSE, EMPTY)
    )
    rgb = faint + share_IJ[..., None] * (dense - faint)
    rgb = torch.where(tile_share_IJ[..., None] == 0, empty, rgb)
    return torch.where(tile_share_IJ[..., None] == 1, full, rgb)


def draw(
    plan: MaskPlan,
    target: str | Path | Axes | None,
    *,
    title: str,
    counts: dict[str, int],
    q_tile: int,
    kv_tile: int,
    batch: int = 0,
    head: int = 0,
) -> Any:
    """Draw the tile map of one batch entry and head.

    Args:
        target: a file to write (by its suffix: png, pdf, svg), axes to draw the map into, or None for a new figure.
        counts: class -> number of tiles, for the legend.
    Returns:
        The file's path, the axes, or the figure.
    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot: needs matplotlib; pip install 'magi-flex[plot]'") from error
    if isinstance(target, Axes):
        _draw_map(target, plan, title, counts, q_tile, kv_tile, batch, head)
        return target
    figure = Figure(figsize=(8.2, 7.4), dpi=150, layout="constrained")
    map_axes, profile_axes = figure.subplots(1, 2, width_ratios=(6, 1), sharey=True)
    _draw_map(map_axes, plan, title, counts, q_tile, kv_tile, batch, head)
    _draw_profile(profile_axes, plan, batch, head)
    if target is None:
        return figure
    figure.savefig(target)
    return Path(target)


def _draw_map(
    axes: Axes,
    plan: MaskPlan,
    title: str,
    counts: dict[str, int],
    q_tile: int,
    kv_tile: int,
    batch: int,
    head: int,
) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    if plan.q_len and plan.kv_len:
        rgb = colours(*picture(plan, q_tile, kv_tile, batch, head)).numpy()
        axes.imshow(rgb, extent=(0, plan.kv_len, plan.q_len, 0), aspect="auto", interpolation="nearest")
    for length, tile, line in ((plan.kv_len, kv_tile, axes.axvline), (plan.q_len, q_tile, axes.axhline)):
        if length <= 40 * tile:
            for at in range(tile, length, tile):
                line(at, color="white", linewidth=0.6)

    def patch(colour: str) -> Patch:
        return Patch(facecolor=colour, edgecolor=FRAME, linewidth=0.5)

    patches: dict[str, Any] = {
        "full": patch(FULL),
        "partial": (patch(PARTIAL_DENSE), patch(PARTIAL_FAINT)),
        "empty": patch(EMPTY),
    }
    axes.legend(
        handles=[patches[kind] for kind in counts],
        labels=[f"{kind}  {number:,}" for kind, number in counts.items()],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        title=f"tiles {q_tile} × {kv_tile}",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.09),
        ncols=3,
        frameon=False,
        alignment="center",
    )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.xaxis.set_major_formatter(_grouped)
    axes.yaxis.set_major_formatter(_grouped)
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _draw_profile(axes: Axes, plan: MaskPlan, batch: int, head: int) -> None:
    """Keys that each row attends to, as a curve beside the map (means of neighbouring rows in a long mask)."""
    rows = max(1, -(-plan.q_len // MOST_CELLS))
    if plan.q_len and plan.kv_len:
        rows, keys = _profile_cell(plan, rows)
        area_I = cell_area(plan, rows, keys, batch, head).sum(1).cpu()
        sizes_I = (plan.q_len - torch.arange(len(area_I)) * rows).clamp(max=rows)
        keys_I = (area_I / sizes_I).numpy()
        edges = (torch.arange(len(area_I) + 1) * rows).clamp(max=plan.q_len).numpy()
        axes.stairs(keys_I, edges, orientation="horizontal", fill=True, color=PARTIAL_DENSE, alpha=0.85)
    axes.set_xlim(left=0)
    axes.set_title("keys a row", loc="left", fontsize=9)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.tick_params(axis="x", labelrotation=90)
    axes.locator_params(axis="x", nbins=3)
    axes.xaxis.set_major_formatter(_grouped)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(FRAME)


def _profile_cell(plan: MaskPlan, rows: int) -> tuple[int, int]:
    """Cells as wide as the mask; where bit tiles must stay whole, their multiples."""
    if (bits := _undivided_bit_tiles(plan)) is None:
        return rows, plan.kv_len
    return -(-rows // bits.q_tile) * bits.q_tile, -(-plan.kv_len // bits.kv_tile) * bits.kv_tile


def _grouped(value: float, _position: float) -> str:
    """Tick labels: 4,096 up to ten thousand, then 16K, 1.5M."""
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if abs(value) >= 10 * unit or (unit == 1e6 and abs(value) >= unit):
            return f"{value / unit:g}{name}"
    return f"{value:,.0f}"
