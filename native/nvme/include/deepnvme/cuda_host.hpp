// Page-locking host memory with CUDA, through the driver library found when the program runs; there
// need be none. Not yet run on a GPU: native/tests/test_cuda_host.cpp holds it against a stand-in
// for the driver.
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
        in_use,    // only if this process has loaded the driver and a device's primary context is
                   // active already
        demanded,  // load and initialise it
    };

    // Empty when there is no driver, no device, or (in_use) nothing of it is in use; throws
    // std::runtime_error when it was demanded and cannot be had, saying why.
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
