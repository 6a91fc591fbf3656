// Split-KV forward for wide heads: as ampere/forward_split.cuh, with the CTAs of ampere/wide_forward.cuh.
#pragma once

#include "ampere/forward_merge.cuh"
#include "ampere/wide_forward.cuh"
