"""Which KV heads a rank holds under tensor parallelism."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ..recipe import Recipe


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`.

    Raises:
        ValueError: `rank` is not one of 0 … `size` - 1.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tp_rank must lie in [0, tp_size={self.size}), got {self.rank}")

    def heads(self, total: int) -> range:
        """Of `total` KV heads those that this rank holds: an equal run, or with fewer heads than ranks one head, which
        neighbouring ranks share.

        Raises:
            ValueError: neither of the two numbers divides the other.
        """
        if total % self.size == 0:
            each = total // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if self.size % total == 0:
            head = self.rank // (self.size // total)
            return range(head, head + 1)
        raise ValueError(
            f"{total} KV heads cannot be split over {self.size} ranks, nor each be shared by as many ranks"
        )

    def total(self, held: int, configured: int | None) -> int:
        """KV heads of all ranks in a layer of which each holds `held`, of a model whose config says `configured`."""
        return held * self.size if configured is None or configured >= self.size else configured

    def own(self, x: Tensor, configured: int | None) -> Tensor:
        """Of K or V `x` `[B, H, n, ·]` this rank's head, where each rank computes all of fewer heads than ranks."""
        if configured is None or configured >= self.size or x.shape[1] != configured:
            return x
        heads = self.heads(configured)
        return x[:, heads.start : heads.stop]

    def of(self, recipe: Recipe) -> Recipe:
        """A layer's `recipe` with the calibrated numbers of this rank's heads only."""
        if self.size == 1 or not recipe.calibration:
            return recipe

        def own(numbers: Any) -> Any:
            # One number may stand for all heads.
            if numbers is None or len(numbers) == 1:
                return numbers
            return tuple(numbers[h] for h in self.heads(len(numbers)))

        layer = recipe.calibration[0]
        fields = {f.name: own(getattr(layer, f.name)) for f in dataclasses.fields(layer)}
        return dataclasses.replace(recipe, calibration=(dataclasses.replace(layer, **fields),))
