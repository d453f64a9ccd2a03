// The generators of random numbers, which operations ask for.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

const at::Generator& default_generator(int device);
at::Generator cpu_generator(const at::Generator& generator);  // from which its numbers are
void register_hooks();

}  // namespace standin
