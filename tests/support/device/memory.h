// Memory of devices, closed to the host, and pinned memory, closed to it while a copy is in flight.
//
// The same bytes are mapped twice: at the address that tensors show, which is protected, and at one
// that only kernels know.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <set>
#include <string>
#include <vector>

#include "order.h"

namespace standin {

// A piece of a pool that one allocation has, or that waits for the next one on its stream.
struct Block {
  char* begin;
  size_t size;
  int stream;  // -1 for pinned memory
  bool used = true;
  std::vector<Access> accesses{};  // those that a later access may have to wait for
  std::set<int> recorded{};        // streams that record_stream has named
  Clock freed{};                   // of those streams, when it was freed
  size_t requested = 0;
};

void map_memory(Lock&, int devices, size_t bytes);
Block* block_of(Lock&, const void* address);  // nullptr for other memory of the host
char* kernel_address(const void* address);    // the address itself for other memory of the host
bool is_pinned(const void* address);
int device_of_address(const void* address);  // -1 if it is no memory of a device

void close_to_host(Lock&, Block& block);          // pinned pages in flight; does nothing for others
void open_to_host(Lock&);                         // those that the host has waited for
std::vector<std::string> touches_of_host(Lock&);  // what it has touched too early, since last asked

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

}  // namespace standin
