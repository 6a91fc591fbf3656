"""Which options of a function reach a function that it calls with keyword arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from pytest import MonkeyPatch, raises

from jax_flash.call import Call


class Reached(Exception):
    """Ends a call, with the options that it got so far."""


def check(monkeypatch: MonkeyPatch, module: Any, name: str, function: Callable[..., Any], *args: Any) -> None:
    """Check that `function(*args, **options)` passes each option of a `Call` to `module.<name>` under its name."""
    parameters = inspect.signature(function).parameters
    options = {option: f"<{option}>" for option in parameters if option in Call.__dataclass_fields__}
    if "reproducible_gradients" in parameters:
        options.pop("deterministic")  # which means something else in Flax

    def reached(*args: Any, **given: Any) -> None:
        raise Reached({option: x for option, x in given.items() if option in options})

    monkeypatch.setattr(module, name, reached)
    with raises(Reached) as found:
        function(*args, **options)
    assert found.value.args[0] == options and len(options) > 7
