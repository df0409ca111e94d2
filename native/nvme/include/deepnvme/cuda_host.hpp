// Page-locking host memory with CUDA, through the driver library found when the program runs; there
// need be none. native/tests/test_cuda_host.cpp runs it on a stand-in for the driver,
// scripts/bench/gpu_copies on a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace deepnvme {

// The driver of this process, with the primary context of its first device retained. Copies by any
// device may use what is registered here.
class CudaHost {
  public:
    enum class When : unsigned char {
        // only if this process has loaded the driver and a device's primary context is active
        in_use,
        demanded,  // load and initialise it
    };

    // in_use: empty where this process does not use CUDA. demanded: throws std::runtime_error,
    // which says why, where there is no driver or no device.
    [[nodiscard]] static std::shared_ptr<CudaHost> open(
        When when, const std::string& library = "libcuda.so.1");

    virtual ~CudaHost() = default;
    CudaHost(const CudaHost&) = delete;
    CudaHost& operator=(const CudaHost&) = delete;

    // Throws std::runtime_error with the driver's reason.
    virtual void register_memory(void* memory, std::size_t nbytes) = 0;
    virtual void unregister_memory(void* memory) noexcept = 0;

  protected:
    CudaHost() = default;
};

}  // namespace deepnvme
