// What torch asks of a device: allocators, devices and streams of threads, hooks, generators.
#include "machine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "generator.h"

namespace sim {

namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> these_streams{};

c10::Device device_at(c10::DeviceIndex given) { // -1: the current one
  const auto index = given == -1 ? this_device : given;
  TORCH_CHECK(
      index >= 0 && index < Machine::get().devices(), "there is no device sim:", static_cast<int>(index), ", but ",
      Machine::get().devices(), " (environment variable SIMULATED_DEVICES).");
  return {c10::DeviceType::PrivateUse1, index};
}

c10::Stream stream_of(c10::StreamId id, c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

void free_block(void* block) {
  Machine::get().free(static_cast<Block*>(block));
}

} // namespace

c10::DeviceIndex current_device() {
  return this_device;
}

void set_current_device(c10::DeviceIndex device) {
  this_device = device_at(device).index();
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = device_at(device).index();
  return stream_of(these_streams.at(index), index);
}

void set_current_stream(const c10::Stream& stream) {
  these_streams.at(stream.device_index()) = stream.id();
}

c10::Stream new_stream(c10::DeviceIndex device) {
  static std::array<std::atomic<int>, kMostDevices> made{};
  return stream_of(1 + made.at(device_at(device).index())++ % (kStreams - 1), device);
}

c10::DataPtr data_of(Block* block) {
  return {block->data, block, free_block, block->pinned ? c10::Device(c10::DeviceType::CPU) : block->device};
}

namespace {

// ---------------------------------------------------------------------------------------------------------- allocators

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, device_at(this_device)};
    }
    return data_of(Machine::get().allocate(nbytes, false, current_stream(this_device), {}));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(data.get_context())) {
      Machine::get().record_stream(block, stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return Machine::get().stats(device_at(device).index());
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Machine::get().reset_peak(device_at(device).index()); }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, c10::DeviceType::CPU};
    }
    return data_of(Machine::get().allocate(nbytes, true, stream_of(0, this_device), {}));
  }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

Memory memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

// ---------------------------------------------------------------------------------------------- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(this_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(0, device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return Machine::get().query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { Machine::get().synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { Machine::get().synchronize(device_at(device).index()); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Machine::get().devices());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory.recordStream(data, stream);
  }

  static Event& event_at(void* event) { return *static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "an event of sim:", static_cast<int>(device),
        " cannot be recorded on a stream of sim:", static_cast<int>(stream.device_index()), ".");
    if (*event == nullptr) {
      *event = new Event();
    }
    Machine::get().record(event_at(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Machine::get().wait(event_at(event), stream);
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || Machine::get().query(event_at(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Machine::get().synchronize(event_at(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "an event was not recorded.");
    return std::chrono::duration<double, std::milli>(event_at(second).time - event_at(first).time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

// ---------------------------------------------------------------------------------------------------------- generators

Generator::Generator(c10::DeviceIndex device, uint64_t seed)
    : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      own(at::detail::createCPUGenerator(seed)) {}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < Machine::get().devices(); ++index) {
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
    }
    return made;
  }();
  return all->at(device_at(device).index());
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(Machine::get().devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = this_device;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? this_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(this_device); }
  bool isPinnedPtr(const void* data) const override { return Machine::get().pinned_at(data) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize(storage, nbytes); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ------------------------------------------------------------------------------------------------ for the Python module

TORCH_LIBRARY(sim, library) {
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  library.def("set_checks(bool on) -> bool", [](bool on) { return std::exchange(Machine::get().checks, on); });
  library.def("set_own_hosts(bool on) -> bool", [](bool on) { return std::exchange(Machine::get().own_hosts, on); });
  library.def("set_host_may_wait(bool on) -> bool", [](bool on) {
    return std::exchange(Machine::get().host_may_wait, on);
  });
  library.def("device_count() -> int", []() -> int64_t { return Machine::get().devices(); });
  library.def("host_waits() -> int", []() { return Machine::get().waits.load(); });
  library.def("raise_found() -> ()", []() { Machine::get().raise_found(); });
}

} // namespace

c10::DeviceAllocator* device_allocator() {
  return &memory;
}

} // namespace sim
