// Operators of the CPU on memory of devices.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <vector>

#include "order.h"

namespace standin {

// Makes tensors of the CPU over the memory that tensors of a device or pinned ones have.
class Views {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::map<const void*, c10::Storage> storages_;  // those that share memory share it still
};

Range range_of(const at::Tensor& tensor, bool writes);
at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    c10::ScalarType dtype);
void resize_memory(const at::Tensor& tensor, c10::IntArrayRef sizes);
void host_waits_for_stream(Wait kind, int stream);

// Runs any operator that has a kernel for the CPU.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Every operator that has a kernel for the CPU takes it, so that nothing is decomposed otherwise
// and the bits are the CPU's. Those that were written by hand must be registered by then.
void take_kernels_of_cpu();

}  // namespace standin
