// A device's generator: a host's generator of its own.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace sim {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val);

  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset."); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset."); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }

  at::Generator own; // what the host's kernels draw from

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->own = own.clone();
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex device); // -1: of the current device

} // namespace sim
