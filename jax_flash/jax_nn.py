"""A patch that replaces `jax.nn.dot_product_attention`, for code that you cannot change."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_flash import attention


class JaxNNPatch(AbstractContextManager["JaxNNPatch"]):
    """A patch of `jax.nn.dot_product_attention`, made by `patch_jax_nn`. Leaving its `with` block calls `restore`."""

    def __init__(self) -> None:
        self._before = jax.nn.dot_product_attention
        self._restored = False

        @functools.wraps(self._before)
        def dot_product_attention(*args: Any, **options: Any) -> Any:
            return attention.dot_product_attention(*args, **options | {"implementation": None})

        self._patched = jax.nn.dot_product_attention = dot_product_attention

    def restore(self) -> None:
        """Restore the function that the patch replaced. Further calls do nothing.

        Raises:
          RuntimeError: if `jax.nn.dot_product_attention` was patched again later. Restore the later patch first.
        """
        if self._restored:
            return
        if jax.nn.dot_product_attention is not self._patched:
            raise RuntimeError(
                "jax.nn.dot_product_attention was patched again after this patch: restore the later patch first"
            )
        jax.nn.dot_product_attention = self._before
        self._restored = True

    def __exit__(self, *exception: object) -> None:
        self.restore()


def patch_jax_nn() -> JaxNNPatch:
    """Replace `jax.nn.dot_product_attention` by `jax_flash.dot_product_attention` in the whole process.

    Use it with libraries that call `jax.nn`, such as Keras and Flax nnx. The patch takes effect immediately. Call it
    before you import such a library, because it cannot change a function that was imported by
    `from jax.nn import dot_product_attention`. It does not change programs that `jax.jit` has already traced. A program
    that is traced under the patch keeps the fused attention after `restore()`.

    The replacement ignores `implementation`, because code written for `jax.nn` passes "xla" or "cudnn". It always uses
    the default of `jax_flash.dot_product_attention`: fused kernels if the platform has them.

    Returns:
      A `JaxNNPatch`. Call its `restore()`, or use it as a context manager::

          with jax_flash.patch_jax_nn():
              train(model)
    """
    return JaxNNPatch()
