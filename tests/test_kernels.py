"""The CUDA kernels compile for every architecture, spill nothing and fit its shared memory; no GPU is needed."""

import kernel_variants
import pytest


@pytest.mark.slow
def test_every_feature_and_pair_of_features_compiles():
    chosen = kernel_variants.tested()
    assert {variant.arch for variant in chosen} == set(kernel_variants.SHARED_LIMITS)
    faults = []
    for reports in kernel_variants.compile_all(chosen):
        for report in reports:
            faults += [f"{fault}: {report}" for fault in kernel_variants.faults(report)]
            assert report.seconds < 60, report  # processor time: f32 in full precision with every feature takes 20
    assert not faults, "\n".join(faults)
