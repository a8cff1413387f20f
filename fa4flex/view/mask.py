"""A program's mask to look at: tile classes as text, SVG or a matplotlib figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.analyze.tiles import Shape, TileMap, tile_map
from fa4flex.codegen.blame import dress
from fa4flex.codegen.build import Program, build
from fa4flex.codegen.evaluate import PastTheEnd, Value, evaluate
from fa4flex.default_device import on_the_host
from fa4flex.errors import Fa4flexError, InputError, UnsupportedError
from fa4flex.primitives.mask import Mask
from fa4flex.variant import Variant
from fa4flex.view import ascii, svg
from fa4flex.view.grid import Grid
from fa4flex.view.names import name_of
from fa4flex.view.sizes import Setting, is_size, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE = (128, 128)
MOST_TOKENS = 512
MOST_PANELS = 4


@dataclass(frozen=True)
class MaskView:
    """The mask of a compiled variant. `print` it, plot it, or let a notebook show it."""

    program: Program

    @on_the_host
    def tile_map(
        self,
        q_len: int,
        kv_len: int | None = None,
        tile: tuple[int, int] = TILE,
        batch: int | None = None,
        heads: int | None = None,
    ) -> TileMap:
        """Classes of all tiles of `tile` = (queries, keys) at these lengths.

        batch, heads  default to what captured tensors imply: `ids[b, kv]` has ids.shape[0] sequences
        """
        chosen = setting(self.program, q_len, q_len if kv_len is None else kv_len, batch, heads)
        return self._map(chosen, tile)

    def _map(self, chosen: Setting, tile: tuple[int, int]) -> TileMap:
        if not isinstance(tile, tuple) or len(tile) != 2 or not all(map(is_size, tile)):
            raise InputError(f"tile={tile!r}", "two positive ints (queries, keys)", "e.g. tile=(128, 128)")
        return tiles_of(self.program, chosen, (tile[0], tile[1]))

    def grid(self, tiles: TileMap, chosen: Setting, tile: tuple[int, int], b: int = 0, h: int = 0) -> Grid:
        """Tile classes of batch entry `b` and query head `h`."""
        classes = numpy.asarray(tiles.classes())
        plane = classes[min(b, classes.shape[0] - 1), min(h, classes.shape[1] - 1)]
        return Grid(plane, tile, chosen.shape.q_len, chosen.shape.kv_len)

    @on_the_host
    def draw(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        tile: tuple[int, int] | None = None,
        width: int = 64,
    ) -> str:
        """The mask as text, at most `width` columns: `#` full, `+` partial, `.` empty.

        tile  (queries, keys) per character; default about 32 characters each way, one token at least
        """
        chosen = setting(self.program, q_len, kv_len)
        shape = chosen.shape
        tile = tile or (_share(shape.q_len), _share(shape.kv_len))
        tiles = self._map(chosen, tile)
        grid = ascii.fit(self.grid(tiles, chosen, tile), width)
        rows, columns = grid.tile
        head = f"{self.name}: {shape.q_len} queries down, {shape.kv_len} keys across"
        size = (
            f"a character is {rows} x {columns}" if (rows, columns) != (1, 1) else "a character is one pair"
        )
        return "\n".join([head, *chosen.notes, f"{size}; {ascii.LEGEND}", ascii.draw(grid)])

    @on_the_host
    def plot(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        tile: tuple[int, int] | None = None,
        b: int = 0,
        h: int = 0,
    ) -> Figure:
        """A matplotlib Figure: every pair up to 512 tokens, tiles beyond. Needs the extra `plot`.

        b, h  the batch entry and query head to show; tile defaults to (128, 128), and to an eighth of the
        length where every pair is drawn
        """
        try:
            from fa4flex.view.plot import plot
        except ImportError as error:
            raise UnsupportedError(
                "plot() without matplotlib",
                "matplotlib >= 3.8",
                "pip install 'fa4flex[plot]'; print(attn.mask) draws the mask as text",
            ) from error
        chosen = self._showing(q_len, kv_len, b, h)
        shape = chosen.shape
        small = max(shape.q_len, shape.kv_len) <= MOST_TOKENS
        tile = tile or ((_share(shape.q_len, 8), _share(shape.kv_len, 8)) if small else TILE)
        tiles = self._map(chosen, tile)
        where = _panel_name((tiles.map_batch, tiles.map_heads), b, h)
        title = f"{self.name}{', ' if where else ''}{where}"
        return plot(self.grid(tiles, chosen, tile, b, h), title, self._tokens(shape, b, h) if small else None)

    def _showing(self, q_len: int | None, kv_len: int | None, b: int, h: int) -> Setting:
        """Sizes with a batch and heads that contain `b` and `h`."""
        for name, value in (("b", b), ("h", h)):
            if value != 0 and not is_size(value):
                raise InputError(f"{name}={value!r}", "a non-negative int", f"count {name} from 0")
        usual = setting(self.program, q_len, kv_len).shape
        return setting(self.program, q_len, kv_len, max(usual.batch, b + 1), max(usual.heads, h + 1))

    def _tokens(self, shape: Shape, b: int, h: int) -> numpy.ndarray:
        """Every pair, bool [q_len, kv_len]."""
        symbols: dict[str, Value] = {
            "b": b, "h": h, "q": torch.arange(shape.q_len).view(-1, 1), "kv": torch.arange(shape.kv_len),
            "q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads,
        }  # fmt: skip
        captured = self.program.captured().signed()
        (allowed,) = evaluate(fitted([self.program.facts.mask], shape, captured), symbols, captured)
        return torch.broadcast_to(torch.as_tensor(allowed), (shape.q_len, shape.kv_len)).numpy()

    @property
    def name(self) -> str:
        """The mask in the user's words."""
        allowed = self.program.variant.allowed
        return "every key" if allowed is None else name_of(allowed)

    def __str__(self) -> str:
        return self.draw()

    def __repr__(self) -> str:
        return f"MaskView({self.name})"

    def _repr_html_(self) -> str:
        chosen = setting(self.program)
        tiles = self._map(chosen, TILE)
        planes = tiles.map_batch, tiles.map_heads
        shown = [(b, h) for b in range(planes[0]) for h in range(planes[1])][:MOST_PANELS]
        panels = [(_panel_name(planes, b, h), self.grid(tiles, chosen, TILE, b, h)) for b, h in shown]
        facts = [tile_counts(tiles)]
        if len(shown) < planes[0] * planes[1]:
            facts.append(f"{len(shown)} of {planes[0] * planes[1]} (batch, head) pairs drawn")
        return svg.picture(panels, self.name, [*facts, *chosen.notes])


def view_of(mask: Mask) -> MaskView:
    """The picture of a mask that is not compiled."""
    return MaskView(build(Variant(mask=mask)))


def tiles_of(program: Program, chosen: Setting, tile: tuple[int, int]) -> TileMap:
    """Tile classes at these sizes. Raises InputError where the mask reads beyond a captured tensor."""
    facts, shape = program.facts, chosen.shape
    tile = min(tile[0], shape.q_len), min(tile[1], shape.kv_len)  # larger ones are one tile
    try:
        return tile_map(facts.mask, facts.keys, shape, program.captured(), tile)
    except PastTheEnd as error:
        _dress(error, program)
        raise InputError(
            f"at batch={shape.batch}, heads={shape.heads}, q_len={shape.q_len}, kv_len={shape.kv_len} "
            f"the mask reads beyond a captured tensor: {error.given}",
            "sizes that the captured tensors cover",
            "pass q_len and kv_len (on the command line --size or --q-len, and --kv-len)",
            error.where,
        ) from error
    except Fa4flexError as error:
        _dress(error, program)
        raise


def _dress(error: Fa4flexError, program: Program) -> None:
    lines = [] if program.mask is None else [program.mask.origins]
    dress(error, [operand.name for operand in program.operands], program.scalar_names, *lines)


def _share(length: int, parts: int = 32) -> int:
    """Tokens per cell for about `parts` cells: a power of two, so that tiles fall where kernels have them."""
    return 1 << max(0, (length - 1) // parts).bit_length()


def _panel_name(planes: tuple[int, ...], b: int, h: int) -> str:
    return ", ".join(
        f"{name} {i}" for name, i, n in (("batch", b, planes[0]), ("head", h, planes[1])) if n > 1
    )


def tile_counts(tiles: TileMap) -> str:
    """Number of tiles of each class, and the share of the work that is left."""
    empty, partial, full = tiles.counts()
    total = max(empty + partial + full, 1)
    return (
        f"{total} tiles: {full} full, {partial} partial, {empty} empty; "
        f"{100 * (partial + full) / total:.1f} % of the tiles are computed"
    )
