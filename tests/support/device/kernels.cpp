// Operators that are not simply the CPU's: memory, views, copies, and what torch does otherwise on
// accelerators than on the CPU. At the end, what the Python face calls.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>

#include "devices.h"
#include "memory.h"
#include "operations.h"

namespace standin {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

// ------------------------------------------------------------------ memory and views
Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard({kDevice, static_cast<c10::DeviceIndex>(index_of(device))});
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_on(index_of(device), size, stride, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) {
    resize_memory(self, sizes);
  }
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }

Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset,
                           c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                       C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// Whether `parameter.data = tensor` may take another kind of tensor. Torch lists the dense backends
// by name, without this one. Module.to would therefore make a new parameter at each place, and the
// weights of an embedding and of a head that share one would be two from then on.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  const auto dense = [](const Tensor& tensor) {
    return (tensor.is_cpu() || tensor.is_privateuseone()) && tensor.layout() == at::kStrided;
  };
  return (dense(self) && dense(from)) || self.key_set() == from.key_set();
}

// ------------------------------------------------------------------ copies
void copy_now(const Tensor& to, const Tensor& from) {
  Views views;
  Tensor target = views.of(to);
  at::native::copy_(target, views.of(from), false);
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  const int source = current_stream(from.device().index());
  const int target = current_stream(to.device().index());
  // As with CUDA: on the stream of the source, in order with that of the target.
  if (source != target) {
    order_after(source, target);
  }
  {
    const Launch launch(source, "copy", {range_of(from, false), range_of(to, true)});
    copy_now(to, from);
  }
  if (source != target) {
    order_after(target, source);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  initialize();
  if (to.numel() == 0) {
    return to;
  }
  if (from.is_privateuseone() && to.is_privateuseone()) {
    copy_on_device(from, to);
    return to;
  }
  const bool up = to.is_privateuseone();
  const Tensor& host = up ? from : to;
  const Tensor& device = up ? to : from;
  TORCH_CHECK(host.is_cpu(), "standin: cannot copy to or from ", host.device());
  const int stream = current_stream(device.device().index());
  const bool pinned = host.storage().nbytes() > 0 && is_pinned(host.storage().data());
  std::vector<Range> ranges{range_of(device, up)};
  if (pinned) {
    ranges.push_back(range_of(host, !up));
  }
  {
    const char* const name = up ? "copy from the host" : "copy to the host";
    const Launch launch(stream, name, ranges);
    copy_now(to, from);
  }
  // From pageable memory a copy is staged, so the host may go on; to it, none is asynchronous.
  if (!non_blocking || (!up && !pinned)) {
    host_waits_for_stream(Wait::copy, stream);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize_memory(to, from.sizes());
  return copy_from(from, to, false);
}

// ------------------------------------------------------------------ where torch decides otherwise
// On accelerators torch calls these in place of what it does on the CPU. They do the latter, so
// that random numbers and bits are the same, and they leave the derivatives to their parts.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  Tensor mask = noise.to(at::kBool);
  return {input * (p == 1 ? noise : noise.div_(1 - p)), mask};
}

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const Tensor gates = with_bias(hidden, hidden_bias) + with_bias(input, input_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor cy = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * cy.tanh(), cy, gates.detach()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto ours = with_bias(input, input_bias).chunk(3, 1);
  const auto theirs = with_bias(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (theirs[0] + ours[0]).sigmoid();
  const Tensor update = (theirs[1] + ours[1]).sigmoid();
  const Tensor fresh = (ours[2] + theirs[2] * reset).tanh();
  return {(hx - fresh) * update + fresh, reset.detach()};
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const MaybeTensor& mask, double dropout_p, bool causal,
                         std::optional<double> scale, bool grouped) {
  Views views;
  const auto cpu = [&](const Tensor& tensor) {
    return views.of(tensor).set_requires_grad(tensor.requires_grad() && at::GradMode::is_enabled());
  };
  MaybeTensor cpu_mask;
  if (mask && mask->defined()) {
    cpu_mask = cpu(*mask);
  }
  return at::_fused_sdp_choice(cpu(query), cpu(key), cpu(value), cpu_mask, dropout_p, causal, scale,
                               grouped);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("native_dropout", dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("native_dropout", dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

// Copies resolve the lazy conjugation and negation of complex tensors themselves. Else torch would
// clone what is conjugated, for which it copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The lists are those of CUDA.
using namespace at::autocast;  // which the macros expect
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION) AT_FORALL_FP32(FLOAT32)
        AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_BY_DTYPE) AT_FORALL_PROMOTE(PROMOTE)}

// ------------------------------------------------------------------ for the Python face
TORCH_LIBRARY(standin, m) {
  m.def("start() -> ()", [] {
    take_kernels_of_cpu();
    register_hooks();
    watch_forks();
  });
  m.def("initialize() -> ()", [] { initialize(); });
  m.def("is_initialized() -> bool", [] { return is_initialized() && !is_in_bad_fork(); });
  m.def("is_in_bad_fork() -> bool", [] { return is_in_bad_fork(); });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("rng_state(int device) -> Tensor",
        [](int64_t device) { return default_generator(static_cast<int>(device)).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) {
    auto generator = default_generator(static_cast<int>(device));
    generator.set_state(state);
  });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    auto generator = default_generator(static_cast<int>(device));
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("initial_seed(int device) -> int", [](int64_t device) {
    return static_cast<int64_t>(default_generator(static_cast<int>(device)).current_seed());
  });
  m.def("violations() -> str[]", [] { return take_violations(); });
  m.def("configure(bool check, bool raises, int seed) -> ()",
        [](bool check, bool raises, int64_t seed) { configure(check, raises, seed); });
  m.def("wait_counts() -> int[]", [] { return counts(); });
  m.def("forget_counts() -> ()", [] { forget_counts(); });
  m.def("ignore_next(str kind, int after) -> ()",
        [](const std::string& kind, int64_t after) { ignore_next(kind, after); });
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::choose_attention)
}  // namespace at::native
