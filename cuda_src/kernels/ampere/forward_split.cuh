// Split-KV forward, for few queries and many keys. Each CTA of ampere/forward.cuh computes a part of the keys. A second
// kernel merges the parts (ampere/forward_merge.cuh).
#pragma once

#include "ampere/forward.cuh"
#include "ampere/forward_merge.cuh"
