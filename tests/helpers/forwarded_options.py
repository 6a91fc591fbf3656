"""Checks that a function forwards its options to a function that it calls."""

import inspect
from collections.abc import Callable
from typing import Any

from pytest import MonkeyPatch, raises

from jax_flash.call import Call


class Intercepted(Exception):
    """Stops a call and holds the options that were forwarded."""


def check(monkeypatch: MonkeyPatch, module: Any, name: str, function: Callable[..., Any], *args: Any) -> None:
    """Check that `function(*args, **options)` forwards each option of a `Call` to `module.<name>` under its name."""
    parameters = inspect.signature(function).parameters
    options = {option: f"<{option}>" for option in parameters if option in Call.__dataclass_fields__}
    if "reproducible_gradients" in parameters:
        options.pop("deterministic")  # Flax uses this name for dropout

    def intercept(*args: Any, **given: Any) -> None:
        raise Intercepted({option: x for option, x in given.items() if option in options})

    monkeypatch.setattr(module, name, intercept)
    with raises(Intercepted) as found:
        function(*args, **options)
    assert found.value.args[0] == options and len(options) > 7
