// The arrays of a custom call, each in memory of its own, next to which nothing can be touched.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

// For the report of a segmentation fault: "byte n of result m", or the address.
std::string DescribeAddress(const void* address);

}  // namespace emulator
