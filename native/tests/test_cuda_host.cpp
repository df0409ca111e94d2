// Page-locking through the driver, against a stand-in that counts: no GPU is needed, and none has
// been tried yet.
#include <dlfcn.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "deepnvme/arena.hpp"
#include "deepnvme/cuda_host.hpp"
#include "deepnvme/pool.hpp"

using namespace deepnvme;

namespace {

const std::string library = FAKE_CUDA;

// The stand-in, loaded; unloaded when it goes, so that "not loaded" can be tested too.
class FakeDriver {
  public:
    FakeDriver(bool initialised, bool active, int refuse = 0)
        : handle_(::dlopen(library.c_str(), RTLD_NOW)) {
        CHECK(handle_ != nullptr);
        function<void(bool, bool, int)>("fake_reset")(initialised, active, refuse);
    }
    ~FakeDriver() { ::dlclose(handle_); }
    FakeDriver(const FakeDriver&) = delete;
    FakeDriver& operator=(const FakeDriver&) = delete;

    [[nodiscard]] int retained() const { return function<int()>("fake_retained")(); }
    [[nodiscard]] int misuse() const { return function<int()>("fake_misuse")(); }
    [[nodiscard]] std::size_t registered_bytes() const {
        return function<std::size_t()>("fake_registered_bytes")();
    }

  private:
    template <typename F>
    [[nodiscard]] F* function(const char* name) const {
        F* found = reinterpret_cast<F*>(::dlsym(handle_, name));
        CHECK(found != nullptr);
        return found;
    }

    void* handle_;
};

}  // namespace

TEST(a_driver_that_nobody_loaded_is_not_in_use) {
    CHECK(CudaHost::open(CudaHost::When::in_use, library) == nullptr);
    CHECK(CudaHost::open(CudaHost::When::in_use, "libno_such_driver.so") == nullptr);
}

TEST(a_missing_driver_that_was_demanded_is_named) {
    try {
        (void)CudaHost::open(CudaHost::When::demanded, "libno_such_driver.so");
        CHECK(false);
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).find("libno_such_driver.so") != std::string::npos);
    }
}

TEST(a_loaded_driver_without_an_active_device_is_not_in_use) {
    const FakeDriver uninitialised(false, false);
    CHECK(CudaHost::open(CudaHost::When::in_use, library) == nullptr);
    const FakeDriver idle(true, false);
    CHECK(CudaHost::open(CudaHost::When::in_use, library) == nullptr);
    CHECK_EQ(idle.retained(), 0);
}

TEST(a_demanded_driver_is_initialised_and_its_context_given_back) {
    const FakeDriver driver(false, false);
    std::shared_ptr<CudaHost> host = CudaHost::open(CudaHost::When::demanded, library);
    CHECK(host != nullptr);
    CHECK_EQ(driver.retained(), 1);
    host.reset();
    CHECK_EQ(driver.retained(), 0);
}

TEST(memory_is_registered_under_the_context_and_unregistered_again) {
    const FakeDriver driver(true, true);
    const std::shared_ptr<CudaHost> host = CudaHost::open(CudaHost::When::in_use, library);
    CHECK(host != nullptr);
    std::vector<char> memory(8192);
    host->register_memory(memory.data(), memory.size());
    CHECK_EQ(driver.registered_bytes(), 8192);
    host->unregister_memory(memory.data());
    CHECK_EQ(driver.registered_bytes(), 0);
    CHECK_EQ(driver.misuse(), 0);
}

TEST(a_refused_registration_says_the_drivers_reason) {
    const FakeDriver driver(true, true, 2);
    const std::shared_ptr<CudaHost> host = CudaHost::open(CudaHost::When::in_use, library);
    std::vector<char> memory(4096);
    try {
        host->register_memory(memory.data(), memory.size());
        CHECK(false);
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
    }
    CHECK_EQ(driver.misuse(), 0);
}

TEST(a_pool_registers_its_arenas_and_takes_it_back_before_they_are_unmapped) {
    const FakeDriver driver(true, true);
    std::shared_ptr<Pool> pool = Pool::make(4 << 20);
    pool->pin_with(CudaHost::open(CudaHost::When::in_use, library));
    CHECK_EQ(driver.registered_bytes(), pool->capacity());
    std::shared_ptr<Block> block = pool->take(100);
    pool.reset();
    CHECK_EQ(driver.registered_bytes(), 4 << 20);  // the block keeps the arena
    block.reset();
    CHECK_EQ(driver.registered_bytes(), 0);
    CHECK_EQ(driver.retained(), 0);
    CHECK_EQ(driver.misuse(), 0);
}

TEST(a_pool_that_cannot_be_pinned_works_unpinned) {
    const FakeDriver driver(true, true, 2);
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    CHECK_THROWS(pool->pin_with(CudaHost::open(CudaHost::When::in_use, library)),
                 std::runtime_error);
    CHECK_EQ(driver.registered_bytes(), 0);
    CHECK_EQ(pool->take(4096)->size(), 4096);
}
