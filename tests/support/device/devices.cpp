// What torch asks of an accelerator: devices, streams, events and generators of random numbers.
#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>

#include "memory.h"
#include "order.h"

namespace standin {
namespace {

struct Event {
  bool recorded = false;
  Clock clock{};
  double milliseconds = 0;
  uint64_t denials = 0;  // how often a query may still say no before the host has waited
};

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(time).count();
}

uint64_t draw(uint64_t below) {
  Lock lock = take_lock();
  return random(lock)() % below;
}

c10::Stream as_stream(int stream) {
  const c10::Device device(kDevice, static_cast<c10::DeviceIndex>(device_of(stream)));
  return c10::Stream(c10::Stream::UNSAFE, device, stream);
}

int number_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  using Device = c10::Device;
  using Stream = c10::Stream;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Device getDevice() const override {
    return {kDevice, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  Device exchangeDevice(Device device) const override {
    const Device old = getDevice();
    setDevice(device);
    return old;
  }

  Stream getStream(Device device) const override {
    return as_stream(current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return as_stream(index_of(device)); }
  Stream getNewStream(Device device, int) const override {
    return as_stream(new_stream(index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream old = getStream(stream.device());
    set_current_stream(number_of(stream));
    return old;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);  // never null
  }
  bool queryStream(const Stream& stream) const override {
    const Clock clock = clock_of(number_of(stream));
    if (!host_has_waited_for(clock) && (!is_done(clock) || draw(2) == 0)) {
      return false;
    }
    host_has_seen(clock);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    initialize();
    host_waits(Wait::stream, clock_of(number_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    if (!is_initialized() && !is_in_bad_fork()) {
      return;  // there is nothing to wait for, and this is no use of a device
    }
    initialize();
    host_waits(Wait::device, clock_of_device(device < 0 ? current_device() : device));
  }

  void record(void** made, const Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    initialize();
    TORCH_CHECK(device == -1 || device == stream.device_index(), "standin: an event of device ",
                static_cast<int>(device), " cannot be recorded on device ",
                static_cast<int>(stream.device_index()));
    if (*made == nullptr) {
      *made = new Event;
    }
    auto& event = *static_cast<Event*>(*made);
    if (is_ignored(Wait::record_event)) {
      return;
    }
    event = {true, clock_of(number_of(stream)), now(), draw(4)};
  }
  void block(void* event, const Stream& stream) const override {
    initialize();
    if (event != nullptr && !is_ignored(Wait::wait_event)) {
      order_stream_after(number_of(stream), static_cast<Event*>(event)->clock);
    }
  }
  bool queryEvent(void* asked) const override {
    auto* const event = static_cast<Event*>(asked);
    if (event == nullptr || !event->recorded) {
      return true;
    }
    if (!host_has_waited_for(event->clock)) {
      if (!is_done(event->clock)) {
        return false;
      }
      if (event->denials > 0) {
        event->denials--;
        return false;
      }
    }
    host_has_seen(event->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    initialize();
    if (event != nullptr) {
      host_waits(Wait::event, static_cast<Event*>(event)->clock);
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto* const begin = static_cast<Event*>(first);
    auto* const end = static_cast<Event*>(second);
    TORCH_CHECK(begin && end && begin->recorded && end->recorded,
                "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(host_has_waited_for(begin->clock) && host_has_waited_for(end->clock),
                "Both events must be completed before calculating elapsed time.");
    return end->milliseconds - begin->milliseconds;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The numbers are those of the generator of the CPU.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDevice, device),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* const copy = new Generator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }

  at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>();
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override { initialize(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = getCurrentDevice();
    set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_address(data);
    TORCH_CHECK(device >= 0, "standin: this is not memory of a device");
    return {kDevice, static_cast<c10::DeviceIndex>(device)};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator().allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      device_allocator().copy_data(fresh.mutable_get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto* const all = [] {
    auto* const made = new std::vector<at::Generator>;
    for (int each = 0; each < device_count(); each++) {
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(each)));
    }
    return made;
  }();
  return all->at(device);
}

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.device().type() == kDevice
             ? static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu
             : generator;
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace standin
