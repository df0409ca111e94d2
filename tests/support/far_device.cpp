// A device of torch's, `hpu:0`, whose memory is the host's: what a GPU is to the engine, on a
// machine without one. A test instrument. Its tensors are others than the CPU's to torch: they do
// not mix, have no numpy, and their backward runs on a thread of its own. What they compute, the
// CPU computes. Freed memory is NaN, is never given back to the system, and counts against a limit
// that can be set. Tensors are made where the bytes of others lie, or a copy is due, by ops here.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::HPU;
constexpr std::size_t kAlignment = 64;
constexpr int kNothingWritten = 0xFF;  // NaN in every float type

class FarMemory final : public c10::Allocator {
  public:
    c10::DataPtr allocate(std::size_t nbytes) override {
        void* memory = take(nbytes);
        return {memory, memory, &release, c10::Device(kType, 0)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void* target, const void* source, std::size_t nbytes) const override {
        default_copy_data(target, source, nbytes);
    }

    std::int64_t allocated() {
        std::lock_guard lock(mutex_);
        return allocated_;
    }

    void set_limit(std::int64_t nbytes) {
        std::lock_guard lock(mutex_);
        limit_ = nbytes;
    }

    std::int64_t peak() {
        std::lock_guard lock(mutex_);
        return peak_;
    }

    void forget_peak() {
        std::lock_guard lock(mutex_);
        peak_ = allocated_;
    }

  private:
    void* take(std::size_t nbytes);
    void give(void* memory);
    static void release(void* memory);

    std::mutex mutex_;
    std::map<std::size_t, std::vector<void*>> idle_;
    std::map<void*, std::size_t> sizes_;
    std::int64_t allocated_ = 0;
    std::int64_t peak_ = 0;
    std::int64_t limit_ = std::numeric_limits<std::int64_t>::max();
};

FarMemory& far_memory() {
    static auto* memory = new FarMemory;  // tensors outlive statics
    return *memory;
}

void* FarMemory::take(std::size_t nbytes) {
    if (nbytes == 0) {
        return nullptr;
    }
    const std::size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated_ + static_cast<std::int64_t>(rounded) <= limit_,
                     "far device out of memory. Tried to allocate ", nbytes, " bytes with ",
                     allocated_, " of ", limit_, " allocated");
    auto& idle = idle_[rounded];
    void* memory = nullptr;
    if (idle.empty()) {
        memory = std::aligned_alloc(kAlignment, rounded);
        TORCH_CHECK(memory != nullptr, "the host has no memory for the far device");
        std::memset(memory, kNothingWritten, rounded);
    } else {
        memory = idle.back();
        idle.pop_back();
    }
    sizes_[memory] = rounded;
    allocated_ += static_cast<std::int64_t>(rounded);
    peak_ = std::max(peak_, allocated_);
    return memory;
}

void FarMemory::give(void* memory) {
    std::lock_guard lock(mutex_);
    const auto found = sizes_.find(memory);
    std::memset(memory, kNothingWritten, found->second);
    idle_[found->second].push_back(memory);
    allocated_ -= static_cast<std::int64_t>(found->second);
    sizes_.erase(found);
}

void FarMemory::release(void* memory) {
    if (memory != nullptr) {
        far_memory().give(memory);
    }
}

// One device, one stream, on which everything has happened when it returns.
struct FarGuard final : c10::impl::DeviceGuardImplInterface {
    FarGuard() = default;
    explicit FarGuard(c10::DeviceType /*type*/) {}

    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device /*device*/) const override { return {kType, 0}; }
    c10::Device getDevice() const override { return {kType, 0}; }
    void setDevice(c10::Device /*device*/) const override {}
    void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
    c10::Stream getStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

// Says to torch that this process has an accelerator, as autograd asks.
struct FarHooks final : at::HPUHooksInterface {
    explicit FarHooks(at::HPUHooksArgs /*arguments*/) {}

    void init() const override {}
    bool hasHPU() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
};

at::Tensor empty_far(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> /*device*/,
                     std::optional<bool> /*pinned*/, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(size, &far_memory(),
                                     c10::DispatchKeySet(c10::DispatchKey::HPU),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_far(c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<c10::ScalarType> dtype,
                             std::optional<c10::Layout> /*layout*/,
                             std::optional<c10::Device> /*device*/,
                             std::optional<bool> /*pinned*/) {
    return at::detail::empty_strided_generic(size, stride, &far_memory(),
                                             c10::DispatchKeySet(c10::DispatchKey::HPU),
                                             c10::dtype_or_default(dtype));
}

// The same bytes as a tensor of the CPU's, which keeps them.
at::Tensor near(const at::Tensor& tensor) {
    if (tensor.is_cpu() || tensor.numel() == 0) {
        return tensor.is_cpu()
                   ? tensor
                   : at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()));
    }
    const c10::Storage kept = tensor.storage();
    return at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept](void*) {},
        at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
    if (target.numel() > 0) {
        near(target).copy_(near(source));
    }
    return target;
}

const at::Tensor& resize_in_place(const at::Tensor& self, c10::IntArrayRef size,
                                  std::optional<c10::MemoryFormat> /*format*/) {
    auto* impl = self.unsafeGetTensorImpl();
    const auto nbytes = static_cast<std::size_t>(c10::multiply_integers(size)) * self.itemsize() +
                        static_cast<std::size_t>(self.storage_offset()) * self.itemsize();
    if (nbytes > self.storage().nbytes()) {
        auto grown = far_memory().allocate(nbytes);
        if (self.storage().nbytes() > 0) {
            std::memcpy(grown.get(), self.storage().data(), self.storage().nbytes());
        }
        impl->unsafe_storage().set_data_ptr_noswap(std::move(grown));
        impl->unsafe_storage().set_nbytes(nbytes);
    }
    impl->set_sizes_contiguous(size);
    return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    if (target.sizes() != source.sizes()) {
        resize_in_place(target, source.sizes(), std::nullopt);
    }
    return copy_from(source, target, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_storage_offset(offset);
    if (stride.empty() && !size.empty()) {
        impl->set_sizes_contiguous(size);
    } else {
        impl->set_sizes_and_strides(size, stride);
    }
    return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    const auto numel = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, {numel}, {});
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    at::native::cpu_fallback(op, stack);
}

std::optional<at::Tensor> near_of(const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional(near(*tensor)) : std::nullopt;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
    return at::convolution_symint(near(input), near(weight), near_of(bias), stride, padding,
                                  dilation, transposed, output_padding, std::move(groups))
        .to(input.device());
}

// The schema does not say that it writes to the running statistics, so a copy of them would be
// written to.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
    const auto [first, second, third] =
        at::native_batch_norm(near(input), near_of(weight), near_of(bias), near_of(mean),
                              near_of(variance), training, momentum, eps);
    return {first.to(input.device()), second.to(input.device()), third.to(input.device())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
    const std::vector<c10::SymInt> bias{grad.sym_size(1)};
    const auto [first, second, third] = at::convolution_backward_symint(
        near(grad), near(input), near(weight), c10::SymIntArrayRef(bias), stride, padding, dilation,
        transposed, output_padding, std::move(groups), wanted);
    const auto far_of = [&grad](const at::Tensor& made) {
        return made.defined() ? made.to(grad.device()) : made;
    };
    return {far_of(first), far_of(second), far_of(third)};
}

// A tensor of the far device where the bytes of one of the CPU's are, which it keeps.
at::Tensor far(const at::Tensor& tensor) {
    auto* kept = new at::Tensor(tensor);
    c10::DataPtr bytes(
        tensor.data_ptr(), kept, [](void* each) { delete static_cast<at::Tensor*>(each); },
        c10::Device(kType, 0));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(), std::move(bytes),
                         &far_memory(), false);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::HPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
    return made;
}

void set_limit(std::int64_t nbytes) {
    far_memory().set_limit(nbytes);
}

std::int64_t allocated() {
    return far_memory().allocated();
}

std::int64_t peak() {
    return far_memory().peak();
}

void forget_peak() {
    far_memory().forget_peak();
}

C10_REGISTER_GUARD_IMPL(HPU, FarGuard)

}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(HPUHooksRegistry, "HPUHooks", FarHooks)
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
    m.impl("empty.memory_format", &empty_far);
    m.impl("empty_strided", &empty_strided_far);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("unfold", &at::native::unfold);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("native_batch_norm", &batch_norm);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
    m.impl("resize_", &resize_in_place);
    m.impl("set_.source_Storage", &set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY(far, m) {
    m.def("far(Tensor tensor) -> Tensor", &far);
    m.def("near(Tensor tensor) -> Tensor", &near);
    m.def("allocated() -> int", &allocated);
    m.def("set_limit(int nbytes) -> ()", &set_limit);
    m.def("peak() -> int", &peak);
    m.def("forget_peak() -> ()", &forget_peak);
}
