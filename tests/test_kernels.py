"""The CUDA kernels compile for every architecture, spill nothing and fit its shared memory; no GPU is needed."""

import itertools

import kernel_variants
import pytest

from jax_flash import _native


@pytest.mark.slow
def test_every_feature_and_pair_of_features_compiles():
    chosen = kernel_variants.tested()
    assert {variant.arch for variant in chosen} == set(kernel_variants.SHARED_LIMITS)
    faults = []
    for report in kernel_variants.tabulated(kernel_variants.compile_all(chosen)):
        faults += [f"{fault}: {report}" for fault in kernel_variants.faults(report)]
        assert report.seconds < 5, report  # processor time
    assert not faults, "\n".join(faults)


def test_hoppers_backward_has_the_tiles_of_its_head_dims():
    """Above head dim 128 tiles of 64 keys, up to that of 128, whatever else there is: it has no others."""
    names = ("window", "mask", "block_mask", "bias", "soft_cap", "dropout")
    values = itertools.product(*(kernel_variants.FEATURES[name] for name in names))
    seen = set()
    for dims, chosen in itertools.product(kernel_variants.DIMS, values):
        features = kernel_variants.PLAIN | dict(zip(names, chosen, strict=True))
        problem = kernel_variants.problem("bfloat16", dims, **features)
        for file, _, defines in _native.cuda_plan(problem.encode(), True, "sm_90a"):
            if file == "backward_sm90.cuh":
                assert ("JAX_FLASH_COLS=64" in defines) == (max(dims) > 128), (dims, chosen)
                seen.add(dims)
    assert seen == set(kernel_variants.DIMS)
