#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <map>
#include <utility>

namespace standin {
namespace {

constexpr size_t kPage = 4096;
constexpr int kPinned = -1;    // in place of a device
constexpr int kPoison = 0xff;  // makes NaNs, and -1 of integers

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Sizes are rounded to eighths of a power of two, so that the next tensor often finds a block.
size_t size_class(size_t bytes, size_t unit) {
  size_t step = unit;
  while (step * 8 < bytes) {
    step *= 2;
  }
  return round_up(bytes, step);
}

// The memory of a device, or all pinned memory.
class Pool {
 public:
  Pool(int device, size_t size) : device_(device), size_(size) {
    const int file = memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0,
                "standin: no memory for a device of ", size, " bytes");
    const int seen = device == kPinned ? PROT_READ | PROT_WRITE : PROT_NONE;
    begin_ = map(file, seen);
    kernels_ = map(file, PROT_READ | PROT_WRITE);
    file_ = file;
    holes_[begin_] = size;
  }

  bool contains(const void* address) const { return address >= begin_ && address < begin_ + size_; }
  char* kernel_address(const void* address) const {
    return kernels_ + (static_cast<const char*>(address) - begin_);
  }
  int device() const { return device_; }
  size_t size() const { return size_; }
  std::map<char*, Block>& blocks() { return blocks_; }
  c10::CachingDeviceAllocator::DeviceStats& stats() { return stats_; }

  Block* block_of(const void* address) {
    auto next = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == blocks_.begin()) {
      return nullptr;
    }
    Block& block = std::prev(next)->second;
    return address < block.begin + block.size ? &block : nullptr;
  }

  // The youngest block of the size that was freed on a stream: a reuse too early shows.
  template <class Ready>
  Block* reuse(int stream, size_t size, Ready ready) {
    auto& list = cached_[{stream, size}];
    for (auto i = list.rbegin(); i != list.rend(); ++i) {
      Block& block = blocks_.at(*i);
      if (ready(block)) {
        list.erase(std::next(i).base());
        return &block;
      }
    }
    return nullptr;
  }

  Block* carve(int stream, size_t size) {
    const auto fits = [&](const auto& hole) { return hole.second >= size; };
    const auto hole = std::find_if(holes_.begin(), holes_.end(), fits);
    if (hole == holes_.end()) {
      return nullptr;
    }
    char* const begin = hole->first;
    const size_t left = hole->second - size;
    holes_.erase(hole);
    if (left > 0) {
      holes_[begin + size] = left;
    }
    std::memset(kernel_address(begin), kPoison, size);
    stats_.reserved_bytes[0].increase(size);
    stats_.segment[0].increase(1);
    stats_.num_device_alloc++;
    return &(blocks_[begin] = Block{begin, size, stream});
  }

  // Blocks of a stream that were freed although another stream may still have used them.
  void suspect(const Block& block) { suspects_[block.stream].insert(block.begin); }
  std::set<char*> take_suspects(int stream) { return std::exchange(suspects_[stream], {}); }

  void keep_for_reuse(Block& block) { cached_[{block.stream, block.size}].push_back(block.begin); }

  // Gives the memory of all free blocks back, so that any stream and size may have it. A real
  // device waits for its work before it unmaps memory, so nobody needs to be asked for the order.
  void release_cached() {
    for (auto& [key, list] : cached_) {
      for (char* const begin : list) {
        release(blocks_.at(begin));
      }
    }
    cached_.clear();
  }

 private:
  char* map(int file, int protection) const {
    void* const at = mmap(nullptr, size_, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "standin: no address space for a device of ", size_, " bytes");
    return static_cast<char*>(at);
  }

  void release(Block& block) {
    char* begin = block.begin;
    size_t size = block.size;
    stats_.reserved_bytes[0].decrease(size);
    stats_.segment[0].decrease(1);
    stats_.num_device_free++;
    if (device_ == kPinned) {
      mprotect(begin, size, PROT_READ | PROT_WRITE);
    }
    const size_t head = round_up(begin - begin_, kPage) - (begin - begin_);
    if (head + kPage <= size) {
      madvise(kernel_address(begin + head), (size - head) / kPage * kPage, MADV_REMOVE);
    }
    blocks_.erase(begin);
    const auto next = holes_.lower_bound(begin);
    if (next != holes_.begin()) {
      const auto last = std::prev(next);
      if (last->first + last->second == begin) {
        begin = last->first;
        size += last->second;
        holes_.erase(last);
      }
    }
    if (next != holes_.end() && next->first == begin + size) {
      size += next->second;
      holes_.erase(next);
    }
    holes_[begin] = size;
  }

  const int device_;
  const size_t size_;
  int file_ = -1;
  char* begin_ = nullptr;    // what tensors show
  char* kernels_ = nullptr;  // the same bytes for kernels
  std::map<char*, Block> blocks_;
  std::map<std::pair<int, size_t>, std::vector<char*>> cached_;  // by stream and size
  std::map<char*, size_t> holes_;                                // what no block has
  std::map<int, std::set<char*>> suspects_;                      // by stream
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// Never changed after the first use, since the handler of signals reads them, and never destroyed:
// threads of autograd free memory while the process ends.
std::vector<Pool*>& devices = *new std::vector<Pool*>;
Pool* pinned = nullptr;
std::set<char*>& in_flight = *new std::set<char*>;  // pinned blocks with pages that are closed

Pool* pool_of(const void* address) {
  for (Pool* const pool : devices) {
    if (pool->contains(address)) {
      return pool;
    }
  }
  return pinned != nullptr && pinned->contains(address) ? pinned : nullptr;
}

// ------------------------------------------------------------------ what the host touches
std::atomic<char*> touched{nullptr};
struct sigaction handler_before;

void on_fault(int, siginfo_t* info, void*) {
  auto* const address = static_cast<char*>(info->si_addr);
  const bool ours = info->si_code == SEGV_ACCERR;
  if (ours && pinned != nullptr && pinned->contains(address)) {
    // Lets the host go on, as it would with a real device; the next call of ours raises.
    touched = address;
    auto* const page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) & ~(kPage - 1));
    mprotect(page, kPage, PROT_READ | PROT_WRITE);
    return;
  }
  if (ours && pool_of(address) != nullptr) {
    constexpr char message[] = "standin: the host has touched memory of a device\n";
    (void)!write(STDERR_FILENO, message, sizeof message - 1);
  }
  sigaction(SIGSEGV, &handler_before, nullptr);  // the access happens again, and ends as always
}

// ------------------------------------------------------------------ allocations
// What is allocated is written next, so who still uses it? Other blocks that were freed on the same
// stream too early are asked too, since a real allocator, which splits and joins its blocks, could
// have given them.
void add_early_reuses(Lock& lock, const Block& block, int stream, std::vector<std::string>& found) {
  const Clock& clock = launch_clock(lock, stream);
  for (const Access& access : block.accesses) {
    if (!in(clock, access) && !in(block.freed, access)) {
      found.push_back("an allocation on " + name_of(stream) +
                      " may get memory that was freed while " + describe(access) +
                      " it: a record_stream is missing");
    }
  }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    initialize();
    const int device = current_device();
    const c10::Device place(kDevice, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) {
      return {nullptr, nullptr, &free, place};
    }
    Lock lock = take_lock();
    complain(lock, touches_of_host(lock));
    Block& block = find(lock, *devices[device], bytes, current_stream(device));
    block.used = true;
    block.requested = bytes;
    auto& stats = devices[device]->stats();
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(block.size);
    stats.active_bytes[0].increase(block.size);
    stats.requested_bytes[0].increase(bytes);
    return {block.begin, block.begin, &free, place};
  }

  at::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto* const target = static_cast<char*>(to);
    auto* const source = static_cast<char*>(const_cast<void*>(from));
    Launch launch(current_stream(device_of_address(to)), "copy",
                  {{source, source + bytes, false}, {target, target + bytes, true}});
    std::memcpy(standin::kernel_address(to), standin::kernel_address(from), bytes);
  }

  bool initialized() override { return is_initialized(); }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock = take_lock();
    for (Pool* const pool : devices) {
      pool->release_cached();
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (is_ignored(Wait::record_stream)) {
      return;
    }
    Lock lock = take_lock();
    Block* const block = block_of(lock, data.get());
    if (block != nullptr && block->stream != stream.id()) {
      block->recorded.insert(static_cast<int>(stream.id()));
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock = take_lock();
    return is_initialized() ? devices.at(device)->stats()
                            : c10::CachingDeviceAllocator::DeviceStats();
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    initialize();
    Lock lock = take_lock();
    Pool& pool = *devices.at(device);
    return {pool.size() - pool.stats().reserved_bytes[0].current, pool.size()};
  }

 private:
  static Block& find(Lock& lock, Pool& pool, size_t bytes, int stream) {
    // A block for which other streams were recorded is free when they are done: now, or not yet.
    const auto ready = [&](const Block& block) {
      return block.recorded.empty() || random(lock)() % 2 == 0;
    };
    const bool absurd = bytes > pool.size();  // and would overflow when rounded
    const size_t size = absurd ? bytes : size_class(bytes, 512);
    Block* block = pool.reuse(stream, size, ready);
    if (block == nullptr && !absurd) {
      block = pool.carve(stream, size);
      if (block == nullptr) {
        pool.stats().num_alloc_retries++;
        pool.release_cached();
        block = pool.carve(stream, size);
      }
    }
    if (block == nullptr) {
      pool.stats().num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", bytes,
                       " bytes. Device ", pool.device(), " has a capacity of ", pool.size(),
                       " bytes of which ", pool.stats().allocated_bytes[0].current,
                       " are allocated.");
    }
    std::vector<std::string> found;
    add_early_reuses(lock, *block, stream, found);
    for (char* const begin : pool.take_suspects(stream)) {
      if (const Block* const other = pool.block_of(begin);
          other && other != block && !other->used) {
        add_early_reuses(lock, *other, stream, found);
      }
    }
    if (!found.empty() && is_checking(lock)) {
      block->accesses.clear();  // told once
      block->used = false;
      pool.keep_for_reuse(*block);
      complain(lock, found);
      return find(lock, pool, bytes, stream);
    }
    block->accesses.clear();
    block->recorded.clear();
    block->freed.clear();
    return *block;
  }

  static void free(void* address) {
    if (address == nullptr || is_in_bad_fork()) {
      return;
    }
    Lock lock = take_lock();
    Block& block = *block_of(lock, address);
    for (const int stream : block.recorded) {
      const Clock& clock = launch_clock(lock, stream);
      block.freed.resize(std::max(block.freed.size(), static_cast<size_t>(stream) + 1));
      block.freed[stream] = static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
    }
    Pool& pool = *pool_of(address);
    std::vector<std::string> early;
    add_early_reuses(lock, block, block.stream, early);
    if (!early.empty()) {
      pool.suspect(block);
    }
    auto& stats = pool.stats();
    stats.allocation[0].decrease(1);
    stats.active[0].decrease(1);
    stats.allocated_bytes[0].decrease(block.size);
    stats.active_bytes[0].decrease(block.size);
    stats.requested_bytes[0].decrease(block.requested);
    lock.unlock();  // nobody else knows the block now
    std::memset(pool.kernel_address(block.begin), kPoison, block.size);
    lock.lock();
    block.used = false;
    pool.keep_for_reuse(block);
  }

  template <class F>
  static void each_stat(c10::DeviceIndex device, F f) {
    if (!is_initialized()) {
      return;
    }
    Lock lock = take_lock();
    auto& stats = devices.at(device)->stats();
    for (auto* const array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      f((*array)[0]);
    }
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    initialize();
    if (bytes == 0) {
      return {nullptr, nullptr, &free, at::kCPU};
    }
    Lock lock = take_lock();
    complain(lock, touches_of_host(lock));
    const size_t size = size_class(bytes, kPage);
    // What is in flight is not given away: the copies are done now, or not yet.
    const auto ready = [&](const Block& block) {
      const auto waited = [&](const Access& each) { return host_has_waited_for(lock, each); };
      return std::all_of(block.accesses.begin(), block.accesses.end(), waited) ||
             random(lock)() % 2 == 0;
    };
    Block* block = pinned->reuse(kPinned, size, ready);
    if (block == nullptr) {
      block = pinned->carve(kPinned, size);
    }
    if (block == nullptr) {
      release_cached(lock);
      block = pinned->carve(kPinned, size);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "standin: out of pinned memory");
    block->used = true;
    block->accesses.clear();
    in_flight.erase(block->begin);
    mprotect(block->begin, block->size, PROT_READ | PROT_WRITE);
    std::memset(pinned->kernel_address(block->begin), kPoison, block->size);
    return {block->begin, block->begin, &free, at::kCPU};
  }

  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    if (is_initialized()) {
      Lock lock = take_lock();
      release_cached(lock);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release_cached(Lock& lock) {
    pinned->release_cached();
    in_flight.clear();
    for (auto& [begin, block] : pinned->blocks()) {
      close_to_host(lock, block);
    }
  }

  static void free(void* address) {
    if (address == nullptr || is_in_bad_fork()) {
      return;
    }
    Lock lock = take_lock();
    Block& block = *block_of(lock, address);
    block.used = false;
    pinned->keep_for_reuse(block);
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

REGISTER_ALLOCATOR(kDevice, &the_device_allocator)
REGISTER_HOST_ALLOCATOR(kDevice, &the_pinned_allocator)

}  // namespace

c10::DeviceAllocator& device_allocator() { return the_device_allocator; }
at::HostAllocator& pinned_allocator() { return the_pinned_allocator; }

void map_memory(Lock&, int count, size_t bytes) {
  for (int device = 0; device < count; device++) {
    devices.push_back(new Pool(device, bytes));
  }
  pinned = new Pool(kPinned, bytes);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &handler_before);
}

Block* block_of(Lock&, const void* address) {
  Pool* const pool = pool_of(address);
  return pool != nullptr ? pool->block_of(address) : nullptr;
}

char* kernel_address(const void* address) {
  Pool* const pool = pool_of(address);
  return pool != nullptr ? pool->kernel_address(address)
                         : static_cast<char*>(const_cast<void*>(address));
}

bool is_pinned(const void* address) { return pinned != nullptr && pinned->contains(address); }

int device_of_address(const void* address) {
  Pool* const pool = pool_of(address);
  return pool != nullptr ? pool->device() : -1;
}

void close_to_host(Lock& lock, Block& block) {
  if (block.stream != kPinned) {
    return;
  }
  in_flight.erase(block.begin);
  std::vector<int> pages(block.size / kPage, PROT_READ | PROT_WRITE);
  for (const Access& access : block.accesses) {
    if (!host_has_waited_for(lock, access)) {
      in_flight.insert(block.begin);
      const size_t last = round_up(access.range.end - block.begin, kPage) / kPage;
      for (size_t i = (access.range.begin - block.begin) / kPage; i < last; i++) {
        pages[i] &= access.range.writes ? PROT_NONE : PROT_READ;  // it may read what a copy reads
      }
    }
  }
  for (size_t first = 0, last = 0; first < pages.size(); first = last) {  // runs of equal pages
    last = std::find_if(pages.begin() + first, pages.end(),
                        [&](int page) { return page != pages[first]; }) -
           pages.begin();
    mprotect(block.begin + first * kPage, (last - first) * kPage, pages[first]);
  }
}

void open_to_host(Lock& lock) {
  for (char* const begin : std::set<char*>(in_flight)) {
    close_to_host(lock, *block_of(lock, begin));
  }
}

std::vector<std::string> touches_of_host(Lock& lock) {
  char* const address = touched.exchange(nullptr);
  Block* const block = address != nullptr ? block_of(lock, address) : nullptr;
  if (block == nullptr || !is_checking(lock)) {
    return {};
  }
  for (const Access& access : block->accesses) {
    if (!host_has_waited_for(lock, access)) {
      return {"the host has touched pinned memory that " + describe(access) +
              ", without having waited for it"};
    }
  }
  return {"the host has touched pinned memory in flight"};
}

}  // namespace standin
