"""The fused attention in the place of `jax.nn.dot_product_attention`, for code that cannot be changed."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_flash import attention


class JaxNNPatch(AbstractContextManager["JaxNNPatch"]):
    """A patch of `jax.nn.dot_product_attention`, as `patch_jax_nn` returns it. Leaving its `with` block restores."""

    def __init__(self) -> None:
        self._before = jax.nn.dot_product_attention
        self._restored = False

        @functools.wraps(self._before)
        def dot_product_attention(*args: Any, **options: Any) -> Any:
            return attention.dot_product_attention(*args, **options | {"implementation": None})

        self._patched = jax.nn.dot_product_attention = dot_product_attention

    def restore(self) -> None:
        """Put back the function that the patch replaced. Further calls do nothing.

        Raises:
          RuntimeError: `jax.nn.dot_product_attention` was patched again afterwards. Restore that patch first.
        """
        if self._restored:
            return
        if jax.nn.dot_product_attention is not self._patched:
            raise RuntimeError(
                "jax.nn.dot_product_attention was patched again after this patch: restore that one first"
            )
        jax.nn.dot_product_attention = self._before
        self._restored = True

    def __exit__(self, *exception: object) -> None:
        self.restore()


def patch_jax_nn() -> JaxNNPatch:
    """Replace `jax.nn.dot_product_attention` by `jax_flash.dot_product_attention`, at once and in the whole process.

    For libraries that call `jax.nn`, such as Keras and Flax nnx. Call it before such a library is imported: what has
    been imported by `from jax.nn import dot_product_attention` stays as it is. So do programs that `jax.jit` has traced
    before, and programs traced under the patch keep the fused attention after `restore()`.

    The new function ignores `implementation`: code written for `jax.nn` passes "xla" or "cudnn", and here both mean the
    default of `jax_flash.dot_product_attention`, which is the fused calls where the platform has kernels.

    Returns:
      An object with `restore()`, which is also a context manager::

          with jax_flash.patch_jax_nn():
              train(model)
    """
    return JaxNNPatch()
