"""Options that `jax_flash.linen` and `jax_flash.nnx` add to Flax's own, and invalid values of these options."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

LEADING, LENGTH = (2, 3), 12  # leading dims and length of the inputs
IDS = np.array([0] * 4 + [1] * 5 + [0] * 3)

SLOPES = np.arange(4, dtype=np.float32) / 8
PROGRAMS = {
    "score_mod": lambda s, b, h, q, k: s - jnp.asarray(SLOPES)[h] * jnp.abs(q - k) * b,
    "mask_mod": lambda b, h, q, k: (q >= k) | (k < b),
}

# Pairs of the options of a Flax call and of the equivalent `jax_flash.dot_product_attention` on flattened leading dims.
OPTIONS = {
    "segments": (
        {"query_segment_ids": IDS, "key_value_segment_ids": (IDS + np.arange(6).reshape(2, 3, 1)) % 2},
        {
            "query_segment_ids": np.tile(IDS, (6, 1)),
            "key_value_segment_ids": (IDS + np.arange(6).reshape(6, 1)) % 2,
        },
    ),
    "lengths": (
        {"key_value_seq_lengths": np.array([[3], [7]])},
        {"key_value_seq_lengths": np.array([3, 3, 3, 7, 7, 7])},
    ),
    "window": ({"local_window_size": (3, 1)},) * 2,
    "soft_cap": ({"logits_soft_cap": 0.5},) * 2,
    "scale": ({"scale": 0.3},) * 2,
    "sinks": ({"sinks": 8 * SLOPES},) * 2,
    "offset": ({"query_offset": 2, "is_causal": True},) * 2,
    "offsets": (
        {"query_offset": np.array([2, -3, 0]), "local_window_size": (4, 0)},
        {"query_offset": np.array([2, -3, 0] * 2), "local_window_size": (4, 0)},
    ),
    "programs": (PROGRAMS,) * 2,  # the batch index of a program counts flattened leading dims
    "reproducible": ({"reproducible_gradients": True}, {"deterministic": True}),
}

# Inputs that are not arrays, and the error messages.
NOT_ARRAYS = [
    ({"query": None}, "query must be an array of numbers, not None"),
    ({"key": "keys"}, "key must be an array of numbers, not 'keys'"),
    ({"value": None}, "value must be an array of numbers, not None"),
]

# Invalid attributes of the modules, and the errors.
WRONG_ATTRIBUTES = [
    *(({"num_heads": heads}, ValueError, "num_heads must be at least 1") for heads in (0, -1)),
    *(({"num_heads": heads}, TypeError, "num_heads must be an int") for heads in ("2", None)),
    ({"dropout_rate": "0.5"}, TypeError, "dropout_rate must be a real number, not '0.5'"),
    ({"dropout_rate": -1.0}, ValueError, "dropout_rate must be from 0 to 1"),
    ({"use_sinks": 1}, TypeError, "use_sinks must be True or False"),
    ({"dropout_rate": 0.5, "deterministic": "False"}, TypeError, "deterministic must be True or False, not 'False'"),
]

# Invalid options, both for the function and for a call of the module, and the errors.
WRONG = [
    ({"query_segment_ids": IDS}, ValueError, "key_value_segment_ids must be given together"),
    ({"query_segment_ids": IDS[1:], "key_value_segment_ids": IDS}, ValueError, "query_segment_ids must have shape"),
    (
        {"query_segment_ids": IDS, "key_value_segment_ids": np.zeros((5, LENGTH), int)},
        ValueError,
        "key_value_segment_ids must be broadcastable to the leading dim",
    ),
    ({"query_segment_ids": IDS / 2, "key_value_segment_ids": IDS}, TypeError, "query_segment_ids must be integers"),
    ({"local_window_size": -1}, ValueError, "local_window_size"),
    ({"local_window_size": "3"}, TypeError, "local_window_size"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap"),
    ({"sinks": np.zeros(5, np.float32)}, ValueError, "sinks must have shape"),
    ({"query_offset": 1.5}, TypeError, "query_offset must be integers"),
    ({"query_offset": np.arange(2)}, ValueError, "query_offset must be broadcastable"),
    ({"query_offset": 2**31}, ValueError, "query_offset must fit in int32"),
    ({"score_mod": "alibi"}, TypeError, "score_mod must be a function of"),
    ({"mask_mod": lambda score, b, h, q, k: q > k}, TypeError, "mask_mod must take 4 arguments"),
    ({"reproducible_gradients": 1}, TypeError, "reproducible_gradients must be True or False"),
    ({"is_causal": "yes"}, TypeError, "is_causal must be True or False"),
    ({"deterministic": "False"}, TypeError, "deterministic must be True or False, not 'False'"),
    ({"dropout_key": jax.random.key(0)}, TypeError, "unexpected keyword argument 'dropout_key'"),
    ({"return_residual": True}, TypeError, "unexpected keyword argument 'return_residual'"),
]


def functional(options):
    """Return `jax_flash.dot_product_attention` with these options as an `attention_fn` for Flax's own modules."""

    def attention_fn(query, key, value, **_):
        folded = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        return jax_flash.dot_product_attention(*folded, **options).reshape(query.shape)

    return attention_fn


def problems(lowered):
    """Return the `problem` attributes of the custom calls in a lowered program, sorted."""
    found = re.findall(r"version=\d+ [^\"]*", lowered.as_text())
    assert found
    return sorted(found)
