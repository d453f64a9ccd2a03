// What has waited for what: streams, events, the host, and the check of every access.
//
// Operations run at once, on the thread that launches them. What a real device would have left open
// is kept by vector clocks: every launch on a stream has a number, the clock of a stream says for
// every stream up to which launch this one has waited, and so does the clock of the host. An access
// whose conflicting predecessor is not in the clock of its stream would be a race on a device that
// works beside the host, so it is reported, whatever the timing was.
//
// Everything here is kept under one lock. A function that takes a `Lock&` expects it to be held.
// Kernels run without it.
#pragma once

#include <c10/core/Stream.h>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// For every stream, the number of its last launch that is known to be done.
using Clock = std::vector<uint64_t>;
using Lock = std::unique_lock<std::mutex>;

// The waits that are counted and can be dropped. The host waits in the first five.
enum class Wait { event, stream, device, item, copy, wait_event, record_event, record_stream };
constexpr const char* kWaits[] = {"event", "stream",     "device",       "item",
                                  "copy",  "wait_event", "record_event", "record_stream"};
constexpr int kHostWaits = 5;
constexpr int kAllWaits = 8;

// Bytes that an operation reads or writes, as users see their addresses.
struct Range {
  char* begin;
  char* end;
  bool writes;
};

// A range that an operation has read or written.
struct Access {
  Range range;
  int stream;
  uint64_t launch;
  std::string operation;
};

// ------------------------------------------------------------------ the process
Lock take_lock();
std::mt19937_64& random(Lock&);  // what a device leaves open is drawn from the seed
bool is_initialized();
bool is_in_bad_fork();
void initialize();  // on first use; raises in the child of a process that has used a device
void watch_forks();
void configure(bool check, bool raises, uint64_t seed);

// ------------------------------------------------------------------ devices and streams
int device_count();
int current_device();
void set_current_device(int device);
int new_stream(int device);
int device_of(int stream);
int current_stream(int device);
void set_current_stream(int stream);
std::string name_of(int stream);

// ------------------------------------------------------------------ the order
void order_after(int later, int earlier);  // what an event that is recorded and awaited does
Clock clock_of(int stream);                // with all that the host has waited for
Clock clock_of_device(int device);         // of all its streams
const Clock& launch_clock(Lock&, int stream);
bool in(const Clock& clock, const Access& access);
bool host_has_waited_for(Lock&, const Access& access);
bool host_has_waited_for(const Clock& clock);
bool is_done(const Clock& clock);  // whether the threads that run it have returned
void order_stream_after(int stream, const Clock& clock);
void host_waits(Wait kind, const Clock& clock);  // counts the wait, unless it is dropped waits
void host_has_seen(const Clock& clock);          // a query that was answered with yes

// ------------------------------------------------------------------ what was wrong
bool is_checking(Lock&);
void complain(Lock&, std::vector<std::string> messages);  // raises the first, if it may
std::string describe(const Access& access);
std::vector<std::string> take_violations();

// ------------------------------------------------------------------ counting and dropping waits
void count(Wait kind);
std::vector<int64_t> counts();
void forget_counts();
void ignore_next(const std::string& kind, int64_t after);
bool is_ignored(Wait kind);  // for this thread

// An operation on a stream, from the check of its accesses to its end. The kernel runs meanwhile.
class Launch {
 public:
  Launch(int stream, std::string operation, const std::vector<Range>& ranges);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void wrote(Range range);  // memory that was allocated for a result

 private:
  const int stream_;
  const std::string operation_;
  uint64_t number_ = 0;
};

}  // namespace standin
