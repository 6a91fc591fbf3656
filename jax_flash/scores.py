"""`Score`: what happens to a score between the product of query and key and the softmax."""

from __future__ import annotations

import dataclasses

from jax_flash.description import Description, Extent
from jax_flash.programs.program import Program


@dataclasses.dataclass(frozen=True, repr=False)
class Score(Description):
    """The changes of a score in their order: the cap, then the bias, then the program."""

    logits_soft_cap: float = 0.0  # 0: none
    bias: Extent | None = None
    bias_dtype: str = "none"
    score_mod: Program | None = None
    score_grad: Program | None = None  # only in a backward: the derivative of score_mod
    score_tangent: Program | None = None  # only in a tangent: the same in forward mode

    @property
    def may_hide_entries(self) -> bool:
        """Whether a score may be -inf, which hides its entry."""
        return self.bias is not None or self.score_mod is not None
