// The simulated accelerator's memory, its streams, and the order of all that happens on them.
//
// Kernels run at once, in the thread that launches them. What is simulated is what may be known of their order: each
// stream has a vector clock, advanced by each operation, joined by events, waits and synchronisations. A block of memory
// remembers who read and wrote it. A use that is not ordered after an earlier one that it conflicts with is a race.
//
// Copies between pinned memory and a device that do not block are performed as late as is permitted: to the host when
// the host has waited for them (until then the target holds NaN), from the host when the target is used. If the host has
// written what is copied before it has waited for the copy, that is a race, too.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int kMostDevices = 16;
constexpr int kStreams = 128; // of a device, handed out in turn, as CUDA's
constexpr int kPoison = 0xFF; // NaN in each floating type, -1 in each signed one

using Time = uint64_t;
using StreamNumber = size_t; // a stream's among those of all devices

StreamNumber number_of(const c10::Stream& stream);

// For each stream the time up to which its operations are known to have ended.
class Clock {
 public:
  void join(const Clock& other);
  bool covers(StreamNumber stream, Time time) const;
  bool covers(const Clock& other) const;
  Time tick(StreamNumber stream);

 private:
  std::vector<Time> times_;
};

struct Operation {
  std::string name;
  StreamNumber stream;
  Time time;
  std::shared_ptr<c10::GatheredContext> stack;
};

struct Access {
  size_t begin, end; // bytes of the block
  bool writes;
  std::shared_ptr<const Operation> operation;
};

// Memory of a device, or pinned memory of the host.
struct Block {
  char* data;
  size_t nbytes;
  bool pinned;
  c10::Device device; // where it is allocated
  StreamNumber home; // the stream in which it is allocated, so freed
  c10::Storage adopted; // owns the memory, if this block does not
  std::vector<StreamNumber> recorded; // streams for which freeing waits
  std::vector<Access> accesses; // later ones cover earlier ones
  int copies = 0; // that are not yet performed and will read or write it
};

// What an operation does with a range of a block.
struct Use {
  Block* block;
  size_t begin, end;
  bool writes;
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool asked = false;
};

class Machine {
 public:
  static Machine& get(); // it lives as long as the process
  int devices() const { return devices_; }

  // Order an operation on a stream after what its thread knows. Raises where a use is a race.
  std::shared_ptr<Operation> launch(const std::string& name, const c10::Stream& stream, const std::vector<Use>& uses);
  // New memory that an operation has made.
  void made(Block* block, const std::shared_ptr<Operation>& operation);
  // A copy of contiguous bytes that is performed later; `pinned` owns the memory on the host.
  void copy_later(const Use& from, const Use& to, const c10::Storage& pinned, const c10::Stream& stream);

  void record(Event& event, const c10::Stream& stream);
  void wait(const Event& event, const c10::Stream& stream); // a stream for an event
  void wait(const c10::Stream& later, const c10::Stream& earlier); // a stream for all that is on another
  bool query(Event& event); // the first time, what the host has not waited for is not yet there
  bool query(const c10::Stream& stream);
  void synchronize(const Event& event);
  void synchronize(const c10::Stream& stream);
  void synchronize(c10::DeviceIndex device);
  void blocked(const c10::Stream& stream, const std::string& name); // the host waits within an operation

  Block* allocate(size_t nbytes, bool pinned, const c10::Stream& home, c10::Storage adopted);
  void free(Block* block);
  Block* pinned_at(const void* data); // null: not pinned
  void record_stream(Block* block, const c10::Stream& stream);
  c10::CachingDeviceAllocator::DeviceStats stats(c10::DeviceIndex device);
  void reset_peak(c10::DeviceIndex device);

  void raise_found(); // races of memory that was freed too early: a destructor cannot raise
  bool checks = true;
  bool host_may_wait = true;
  bool own_hosts = false; // each host thread knows only what it has itself waited for
  std::atomic<int64_t> waits{0}; // of the host, within operations

 private:
  struct Copy {
    StreamNumber stream;
    Time time;
    Use from, to;
    c10::Storage pinned; // owns the memory of the host
    bool to_host;
    std::vector<char> taken; // what the source held: of a device in the stream's order, of the host at first
  };

  Machine();
  Clock& host();
  const Access* conflict(const Use& use, const Clock& clock) const;
  void note(const Use& use, const std::shared_ptr<Operation>& operation);
  // Performs what a use needs, or one copy. The caller destroys `done` when it has unlocked.
  void perform(const Use& use, std::list<Copy>& done);
  void perform(std::list<Copy>::iterator copy, std::list<Copy>& done);
  void end_of(std::list<Copy>::iterator copy, std::list<Copy>& done); // of a copy from the host: was its source left alone?
  void knows(const Clock& clock, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  int devices_;
  std::vector<Clock> clocks_; // by stream
  Clock one_host_;
  std::map<size_t, Clock> hosts_; // by thread
  std::list<Copy> copies_; // that are not yet performed
  std::list<Copy> from_host_; // that the host has not waited for
  std::map<const char*, Block*> pinned_;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats_;
  std::vector<std::string> found_;
};

// Of this thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);

c10::DeviceAllocator* device_allocator();
c10::DataPtr data_of(Block* block);
void resize(const c10::Storage& storage, size_t nbytes); // keeps what it holds

} // namespace sim
