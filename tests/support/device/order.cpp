#include "order.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>

#include <c10/util/Exception.h>

#include "memory.h"

// Python's own, declared here so that no header of Python is needed. A thread that waits for the
// kernel of another one must not hold the interpreter's lock, which that kernel may need.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}

namespace standin {
namespace {

struct StreamState {
  int device;
  Clock clock;        // [s] is the number of the last launch of stream s that this one comes after
  uint64_t done = 0;  // the last launch whose kernel has returned
};

struct State {
  std::mutex mutex;
  std::condition_variable returned;  // a kernel has
  int devices = 2;
  bool check = true;
  bool raises = true;
  std::atomic<bool> initialized{false};
  std::atomic<bool> bad_fork{false};
  std::mt19937_64 random;
  std::deque<StreamState> streams;  // the first are the default streams of the devices
  Clock host;
  std::vector<std::string> violations;
  std::array<std::atomic<int64_t>, kAllWaits> counts{};
};

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

// Never destroyed: threads of autograd free memory while the process ends.
State& state() {
  static State* const it = [] {
    auto* made = new State;
    made->devices = std::stoi(variable("STANDIN_DEVICES", "2"));
    made->check = variable("STANDIN_CHECK", "1") != "0";
    made->random.seed(std::stoull(variable("STANDIN_SEED", "0")));
    for (int device = 0; device < made->devices; device++) {
      made->streams.push_back({device, {}});
    }
    return made;
  }();
  return *it;
}

thread_local int the_device = 0;
thread_local std::vector<int> the_streams;
thread_local int launches_of_thread = 0;
// For each kind, how many waits count before the one that does not; -1 if all do.
thread_local std::array<int64_t, kAllWaits> ignored{-1, -1, -1, -1, -1, -1, -1, -1};

uint64_t part(const Clock& clock, size_t stream) {
  return stream < clock.size() ? clock[stream] : 0;
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) {
    clock.resize(other.size());
  }
  for (size_t i = 0; i < other.size(); i++) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

bool contains(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++) {
    if (other[i] > part(clock, i)) {
      return false;
    }
  }
  return true;
}

bool returned(Lock&, const Clock& clock) {
  for (size_t i = 0; i < clock.size(); i++) {
    if (clock[i] > state().streams[i].done) {
      return false;
    }
  }
  return true;
}

// Waits until the kernels that a clock speaks of have returned. This cannot deadlock, since a clock
// speaks of launches alone that are older than whoever waits for it.
void wait_until_returned(Lock& lock, const Clock& clock) {
  if (launches_of_thread > 0 || returned(lock, clock)) {
    return;  // the first: a kernel of the CPU that uses a device itself
  }
  lock.unlock();
  void* const python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  lock.lock();
  state().returned.wait(lock, [&] { return returned(lock, clock); });
  lock.unlock();
  if (python != nullptr) {
    PyEval_RestoreThread(python);
  }
  lock.lock();
}

std::vector<std::string> conflicts(Lock& lock, int stream, const std::string& operation,
                                   const std::vector<Range>& ranges) {
  std::vector<std::string> found;
  const Clock& clock = state().streams[stream].clock;
  for (const Range& range : ranges) {
    Block* const block = block_of(lock, range.begin);
    if (block == nullptr || range.begin == range.end) {
      continue;
    }
    for (const Access& earlier : block->accesses) {
      const bool overlap = earlier.range.begin < range.end && range.begin < earlier.range.end;
      if (overlap && (earlier.range.writes || range.writes) && !in(clock, earlier)) {
        found.push_back(operation + " on " + name_of(stream) +
                        (range.writes ? " writes what " : " reads what ") + describe(earlier) +
                        ", without having waited for it");
      }
    }
  }
  return found;
}

// Keeps an access, and forgets those that need no check of their own any more.
void keep(Lock& lock, Block& block, Access access) {
  auto& kept = block.accesses;
  const auto covered = [&](const Access& old) {
    const bool inside = access.range.begin <= old.range.begin && old.range.end <= access.range.end;
    return host_has_waited_for(lock, old) ||
           (inside && (access.range.writes || (old.stream == access.stream && !old.range.writes)));
  };
  kept.erase(std::remove_if(kept.begin(), kept.end(), covered), kept.end());
  kept.push_back(std::move(access));
  close_to_host(lock, block);
}

}  // namespace

// ------------------------------------------------------------------ the process
Lock take_lock() { return Lock(state().mutex); }
std::mt19937_64& random(Lock&) { return state().random; }
bool is_initialized() { return state().initialized; }
bool is_in_bad_fork() { return state().bad_fork; }
bool is_checking(Lock&) { return state().check; }

void initialize() {
  TORCH_CHECK(!is_in_bad_fork(),
              "Cannot re-initialize standin in forked subprocess. To use standin with "
              "multiprocessing, you must use the 'spawn' start method");
  if (is_initialized()) {
    return;
  }
  Lock lock = take_lock();
  if (!is_initialized()) {
    map_memory(lock, state().devices, std::stoull(variable("STANDIN_MEMORY_MB", "4096")) << 20);
    state().initialized = true;
  }
}

void watch_forks() {
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                 [] {
                   state().bad_fork = state().bad_fork || is_initialized();
                   state().mutex.unlock();
                 });
}

void configure(bool check, bool raises, uint64_t seed) {
  Lock lock = take_lock();
  state().check = check;
  state().raises = raises;
  state().random.seed(seed);
}

// ------------------------------------------------------------------ devices and streams
int device_count() { return state().devices; }
int current_device() { return the_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "standin: invalid device ordinal ", device);
  the_device = device;
}

int new_stream(int device) {
  initialize();
  Lock lock = take_lock();
  state().streams.push_back({device, {}});
  return static_cast<int>(state().streams.size()) - 1;
}

int device_of(int stream) {
  Lock lock = take_lock();
  return state().streams.at(stream).device;
}

int current_stream(int device) {
  if (the_streams.empty()) {
    for (int i = 0; i < device_count(); i++) {
      the_streams.push_back(i);
    }
  }
  return the_streams.at(device);
}

void set_current_stream(int stream) {
  const int device = device_of(stream);
  current_stream(device);  // makes the list of this thread
  the_streams[device] = stream;
}

std::string name_of(int stream) {
  return "stream " + std::to_string(stream) + " of device " +
         std::to_string(state().streams[stream].device);
}

// ------------------------------------------------------------------ the order
const Clock& launch_clock(Lock&, int stream) {
  Clock& clock = state().streams[stream].clock;
  join(clock, state().host);  // what the host has waited for is done before it launches anything
  return clock;
}

Clock clock_of(int stream) {
  Lock lock = take_lock();
  return launch_clock(lock, stream);
}

Clock clock_of_device(int device) {
  Lock lock = take_lock();
  Clock all;
  for (const StreamState& stream : state().streams) {
    if (stream.device == device) {
      join(all, stream.clock);
    }
  }
  return all;
}

void order_after(int later, int earlier) { order_stream_after(later, clock_of(earlier)); }

void order_stream_after(int stream, const Clock& clock) {
  Lock lock = take_lock();
  join(state().streams[stream].clock, clock);
}

bool in(const Clock& clock, const Access& access) {
  return access.launch <= part(clock, access.stream);
}

bool host_has_waited_for(Lock&, const Access& access) { return in(state().host, access); }

bool host_has_waited_for(const Clock& clock) {
  Lock lock = take_lock();
  return contains(state().host, clock);
}

bool is_done(const Clock& clock) {
  Lock lock = take_lock();
  return returned(lock, clock);
}

void host_waits(Wait kind, const Clock& clock) {
  count(kind);
  if (!is_ignored(kind)) {
    host_has_seen(clock);
  }
}

void host_has_seen(const Clock& clock) {
  if (!is_initialized() || is_in_bad_fork()) {
    return;
  }
  Lock lock = take_lock();
  wait_until_returned(lock, clock);
  const auto touched = touches_of_host(lock);
  join(state().host, clock);
  open_to_host(lock);
  complain(lock, touched);
}

// ------------------------------------------------------------------ what was wrong
void complain(Lock&, std::vector<std::string> messages) {
  auto& all = state().violations;
  all.insert(all.end(), messages.begin(), messages.end());
  TORCH_CHECK(messages.empty() || !state().raises, "standin: ", messages.front());
}

std::string describe(const Access& access) {
  return access.operation + " on " + name_of(access.stream) +
         (access.range.writes ? " writes" : " reads");
}

std::vector<std::string> take_violations() {
  Lock lock = take_lock();
  auto found = std::move(state().violations);
  state().violations.clear();
  for (auto& touch : touches_of_host(lock)) {
    found.push_back(std::move(touch));
  }
  return found;
}

// ------------------------------------------------------------------ counting and dropping waits
void count(Wait kind) { state().counts[static_cast<int>(kind)]++; }

std::vector<int64_t> counts() { return {state().counts.begin(), state().counts.end()}; }

void forget_counts() {
  for (auto& each : state().counts) {
    each = 0;
  }
}

void ignore_next(const std::string& kind, int64_t after) {
  const auto* const found = std::find(std::begin(kWaits), std::end(kWaits), kind);
  TORCH_CHECK(found != std::end(kWaits), "standin: there is no kind of wait called ", kind);
  ignored[found - kWaits] = after;
}

bool is_ignored(Wait kind) {
  int64_t& left = ignored[static_cast<int>(kind)];
  return left >= 0 && left-- == 0;
}

// ------------------------------------------------------------------ launches
Launch::Launch(int stream, std::string operation, const std::vector<Range>& ranges)
    : stream_(stream), operation_(std::move(operation)) {
  initialize();
  Lock lock = take_lock();
  complain(lock, touches_of_host(lock));
  Clock before = launch_clock(lock, stream_);
  if (state().check) {
    // What is not to be run leaves no trace: the launch has no number yet.
    complain(lock, conflicts(lock, stream_, operation_, ranges));
  }
  Clock& clock = state().streams[stream_].clock;
  clock.resize(std::max(clock.size(), static_cast<size_t>(stream_) + 1));
  number_ = ++clock[stream_];
  if (state().check) {
    for (const Range& range : ranges) {
      if (Block* const block = block_of(lock, range.begin); block && range.begin < range.end) {
        keep(lock, *block, {range, stream_, number_, operation_});
      }
    }
  }
  // Other threads may still run what this has waited for, or an older launch of the same stream.
  wait_until_returned(lock, before);
  launches_of_thread++;
}

Launch::~Launch() {
  launches_of_thread--;
  Lock lock = take_lock();
  auto& done = state().streams[stream_].done;
  done = std::max(done, number_);
  state().returned.notify_all();
}

void Launch::wrote(Range range) {
  Lock lock = take_lock();
  if (Block* const block = block_of(lock, range.begin); block && state().check) {
    keep(lock, *block, {range, stream_, number_, operation_});
  }
}

}  // namespace standin
